"""Attention over a paged KV cache: the ragged row layout and the backend protocol.

Shapes: T tokens of the step, B rows, N query heads, K kv heads, H head dim, S slots, P pages per slot.
Prefill and decode are rows of one layout (start, length): no phase flag; mixed batches are natural.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

# What a model sees of all this: attend(layer, q_TNH, k_TKH, v_TKH) -> out_TNH. Stores k and v, then attends.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class RowLayout:
    """Rows of one step, host side, in row order.

    slots_B: page table rows. starts_B: tokens already in the KV cache. lengths_B: new tokens of the row (>= 1).
    Row b attends from positions starts[b] .. starts[b]+lengths[b]-1 to everything at or before each, as far as the layer's window.
    """

    slots_B: np.ndarray
    starts_B: np.ndarray
    lengths_B: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.slots_B)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths_B.sum())


@dataclass(frozen=True)
class Limits:
    """What a backend can do, as data, so that `select` can explain its choice. Empty tuple: anything.

    soft_cap, windows: whether it can cap scores and bound how far a layer sees.
    """

    devices: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    head_dims: tuple[int, ...] = ()
    page_sizes: tuple[int, ...] = ()
    soft_cap: bool = True
    windows: bool = True
    graph_capture: bool = False


@dataclass(frozen=True)
class AttentionShape:
    """What a model asks of its backend; heads are those of this rank.

    scale: of the scores, None: 1/sqrt(head_dim). soft_cap: scores s become soft_cap * tanh(s / soft_cap). windows: per layer, how
    many tokens a token sees, itself included; None: all before it; empty: no layer has a window.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float | None = None
    soft_cap: float | None = None
    windows: tuple[int | None, ...] = ()

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None


class AttentionPlan(Protocol):
    """Index tensors of one step; made by a backend, opaque to everybody else."""


class AttentionBackend(Protocol):
    """`plan` once a step, on the engine stream (it reads the page table); `run` once a layer."""

    limits: Limits

    def plan(self, rows: RowLayout, page_table_SP: Tensor) -> AttentionPlan: ...

    def run(
        self,
        layer: int,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        k_cache_CKH: Tensor,
        v_cache_CKH: Tensor,
        plan: AttentionPlan,
    ) -> Tensor:
        """Store k and v of the step into the layer's cache (C = pages * page_size token places), then attend. -> out_TNH."""
