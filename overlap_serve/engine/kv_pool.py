"""`KVPool`: KV cache, page table and token pool on the device, and the deltas of a plan as writes to them.

Owns tensors for the life of the process; which page belongs to whom is the scheduler's business. Only work functions of the
engine stream touch the tensors (invariant 2); `PoolDelta` carries what such a function needs, as step-private tensors.

L layers, C token places, K kv heads, H head dim, S slots, P pages per slot, M places of a token pool row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from overlap_serve.config import EngineSpec


@dataclass(frozen=True)
class JoinDelta:
    """Where a joining slot's tokens and pages lie in the step's flat buffers."""

    slot: int
    tokens: slice
    pages: slice


@dataclass(frozen=True)
class PoolDelta:
    """A plan's changes. join_tokens, join_pages: int32, of all joins; page_places: flat places in the page table of `new_pages`."""

    joins: tuple[JoinDelta, ...]
    join_tokens: Tensor
    join_pages: Tensor
    page_places: Tensor
    new_pages: Tensor


class KVPool:
    """k_LCKH, v_LCKH: place = page * page_size + offset. page_table_SP: int32, entries past a slot's own pages are stale but
    name some page. tokens_SM: int32, known token ids by position; one place more than max_model_len, for the last token sampled."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_pages: int,
        page_size: int,
        num_slots: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        self.max_tokens = max_model_len + 1
        self.pages_per_slot = -(-self.max_tokens // page_size)
        shape = (num_layers, num_pages * page_size, num_kv_heads, head_dim)
        self.k_LCKH = zeros(shape, dtype, device)
        self.v_LCKH = zeros(shape, dtype, device)
        self.page_table_SP = torch.zeros((num_slots, self.pages_per_slot), dtype=torch.int32, device=device)
        self.tokens_SM = torch.zeros((num_slots, self.max_tokens), dtype=torch.int32, device=device)

    def apply(self, delta: PoolDelta) -> None:
        """Upload joining requests and append pages. Engine stream only."""
        for join in delta.joins:
            tokens, pages = delta.join_tokens[join.tokens], delta.join_pages[join.pages]
            self.tokens_SM[join.slot, : len(tokens)] = tokens
            self.page_table_SP[join.slot, : len(pages)] = pages
        if len(delta.new_pages):
            self.page_table_SP.view(-1).index_copy_(0, delta.page_places, delta.new_pages)

    def read_tokens(self, places_T: Tensor) -> Tensor:
        """Token ids at flat places (slot * M + position). Engine stream only."""
        return self.tokens_SM.view(-1).index_select(0, places_T)

    def write_tokens(self, places_R: Tensor, ids_R: Tensor) -> None:
        """Sampled ids, int32, to flat places. Engine stream only."""
        self.tokens_SM.view(-1).index_copy_(0, places_R, ids_R)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros whose untouched pages stay unmapped on a CPU: the pool may be larger than what is ever used of it.

    torch.zeros writes them all (21 s for the 7 GB of the embedded model's default pool); numpy's come from calloc.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)


def page_bytes(spec: EngineSpec) -> int:
    """K and V of one page, all layers, on one rank."""
    return spec.kv_elements_per_token * spec.dtype_bytes * spec.page_size
