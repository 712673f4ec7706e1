"""`ReferenceAttention`: plain torch on any device; the oracle of other backends, and the backend of CPUs.

Owns no cache. Rows of one token (decode) are attended together, longer rows (prefill chunks) one by one. Two ideas:
* Grouped queries never expand K and V: the query heads of a kv head are its "query positions" in decode and a batch dimension
  of stride 0 in prefill.
* Decode rows are gathered page by page into a reused workspace, in groups of similar length and bounded size.

T tokens of the step, R rows of a group, L longest context of a group, N query heads, K kv heads, G = N / K, H head dim,
C token places, P pages per slot. A cache page is `page_size` consecutive places.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from overlap_serve.attention.base import AttentionPlan, Limits, RowLayout

# Measured on an EPYC core (1 MiB L2), 3 kv heads of 64, 16 rows of 512 tokens, ms a layer for groups of 512, 1,024, 4,096 and all
# tokens: float32 2.96, 2.79, 2.65, 3.50; bfloat16 2.52, 2.27, 2.00, 2.00.
CPU_GROUP_TOKENS = 4096
MAX_PADDING = 128  # tokens; a group of its own costs about as much as attending to so many (25 us here)


@dataclass(frozen=True)
class DecodeGroup:
    """Rows of one token that are attended together, padded to the longest context.

    tokens: their places among the step's tokens. pages: [R * pages of L]. padding: places among the gathered
    tokens (R * pages of L * page_size) that lie in [0, L) of a row but past its own context; bias_R11L: -inf there. Both None when
    nothing is padded.
    """

    tokens: slice | Tensor
    num_rows: int
    length: int
    pages: Tensor
    padding: Tensor | None
    bias_R11L: Tensor | None


@dataclass(frozen=True)
class Chunk:
    """A row of several tokens. pages and bias_TL: None when it starts its request, then K and V of the step are all there is."""

    tokens: slice
    end: int
    pages: Tensor | None
    bias_TL: Tensor | None


@dataclass(frozen=True)
class ReferencePlan:
    """places_T: where in the cache each new token goes."""

    places_T: Tensor
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]


class ReferenceAttention:
    """group_tokens: padded context tokens of a decode group; a longer row is a group of its own. scale: 1/sqrt(H) by default.

    A row reads its own context only, whatever the rest of the cache holds (NaN included).
    Holds workspaces, so one instance belongs to one stream.
    """

    limits = Limits()

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: torch.dtype,
        *,
        group_tokens: int = CPU_GROUP_TOKENS,
        scale: float | None = None,
    ) -> None:
        assert num_heads % num_kv_heads == 0, f"{num_heads} query heads do not divide among {num_kv_heads} kv heads"
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._num_groups = num_heads // num_kv_heads
        self._head_dim = head_dim
        self._page_size = page_size
        self._dtype = dtype
        self._group_tokens = group_tokens
        self._scale = scale
        self._workspaces: tuple[Tensor, Tensor] | None = None

    # -- once a step

    def plan(self, rows: RowLayout, page_table_SP: Tensor) -> ReferencePlan:
        first_B = np.cumsum(rows.lengths_B) - rows.lengths_B
        ends_B = rows.starts_B + rows.lengths_B
        groups = tuple(
            self._plan_group(rows.slots_B[row], first_B[row], ends_B[row], page_table_SP)
            for row in split_rows(np.flatnonzero(rows.lengths_B == 1), ends_B, self._group_tokens)
        )
        chunks = tuple(
            self._plan_chunk(
                int(rows.slots_B[row]), int(first_B[row]), int(rows.starts_B[row]), int(ends_B[row]), page_table_SP
            )
            for row in np.flatnonzero(rows.lengths_B > 1)
        )
        return ReferencePlan(self._places(rows, first_B, page_table_SP), groups, chunks)

    def _places(self, rows: RowLayout, first_B: np.ndarray, page_table_SP: Tensor) -> Tensor:
        positions_T = np.arange(rows.num_tokens) - np.repeat(first_B - rows.starts_B, rows.lengths_B)
        pages_T, offsets_T = np.divmod(positions_T, self._page_size)
        slots_T = np.repeat(rows.slots_B, rows.lengths_B)
        index = _to_device(np.stack((slots_T, pages_T, offsets_T)), page_table_SP.device)
        return page_table_SP[index[0], index[1]].long().mul_(self._page_size).add_(index[2])

    def _plan_group(
        self, slots_R: np.ndarray, tokens_R: np.ndarray, contexts_R: np.ndarray, page_table_SP: Tensor
    ) -> DecodeGroup:
        device = page_table_SP.device
        length = int(contexts_R.max())
        num_pages = -(-length // self._page_size)
        pages = page_table_SP[_to_device(slots_R, device), :num_pages].flatten()
        padded_RL = np.arange(length) >= contexts_R[:, None]
        padding = bias_R11L = None
        if padded_RL.any():
            padded_in_pages = np.pad(padded_RL, ((0, 0), (0, num_pages * self._page_size - length)))
            padding = _to_device(np.flatnonzero(padded_in_pages), device)
            # In the queries' dtype, and not bool: SDPA would convert it once a layer.
            bias_RL = torch.zeros(padded_RL.shape, dtype=self._dtype, device=device)
            bias_R11L = bias_RL.masked_fill_(_to_device(padded_RL, device), float("-inf"))[:, None, None, :]
        return DecodeGroup(_token_index(tokens_R, device), len(slots_R), length, pages, padding, bias_R11L)

    def _plan_chunk(self, slot: int, first: int, start: int, end: int, page_table_SP: Tensor) -> Chunk:
        tokens = slice(first, first + end - start)
        if start == 0:
            return Chunk(tokens, end, None, None)
        device = page_table_SP.device
        # Token t sees positions up to start + t: -inf above the diagonal that begins there.
        bias_TL = torch.full((end - start, end), float("-inf"), dtype=self._dtype, device=device).triu_(start + 1)
        return Chunk(tokens, end, page_table_SP[slot, : -(-end // self._page_size)], bias_TL)

    # -- once a layer

    def run(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        k_cache_CKH: Tensor,
        v_cache_CKH: Tensor,
        plan: AttentionPlan,
    ) -> Tensor:
        assert isinstance(plan, ReferencePlan)
        k_cache_CKH.index_copy_(0, plan.places_T, k_TKH)
        v_cache_CKH.index_copy_(0, plan.places_T, v_TKH)
        if len(plan.groups) == 1 and not plan.chunks:
            return self._attend_group(q_TNH, k_cache_CKH, v_cache_CKH, plan.groups[0])
        out_TNH = q_TNH.new_empty(q_TNH.shape)
        for group in plan.groups:
            q_RNH = q_TNH[group.tokens] if isinstance(group.tokens, slice) else q_TNH.index_select(0, group.tokens)
            out_RNH = self._attend_group(q_RNH, k_cache_CKH, v_cache_CKH, group)
            if isinstance(group.tokens, slice):
                out_TNH[group.tokens] = out_RNH
            else:
                out_TNH.index_copy_(0, group.tokens, out_RNH)
        for chunk in plan.chunks:
            q, k, v = q_TNH[chunk.tokens], k_TKH[chunk.tokens], v_TKH[chunk.tokens]
            if chunk.pages is not None:
                k, v = (cache[: chunk.end] for cache in self._gather(k_cache_CKH, v_cache_CKH, chunk.pages))
            out_TNH[chunk.tokens] = self._attend_chunk(q, k, v, chunk.bias_TL)
        return out_TNH

    def _attend_group(self, q_RNH: Tensor, k_cache_CKH: Tensor, v_cache_CKH: Tensor, group: DecodeGroup) -> Tensor:
        """-> out_RNH. q is seen as [R, K, G, H]: G queries at one position share a kv head."""
        k_XKH, v_XKH = self._gather(k_cache_CKH, v_cache_CKH, group.pages)
        if group.padding is not None:
            # 0 * NaN is NaN: the bias alone would let stale values of other requests through.
            k_XKH.index_fill_(0, group.padding, 0)
            v_XKH.index_fill_(0, group.padding, 0)
        num_rows, length = group.num_rows, group.length
        out_RKGH = scaled_dot_product_attention(
            q_RNH.view(num_rows, self._num_kv_heads, self._num_groups, self._head_dim),
            k_XKH.view(num_rows, -1, self._num_kv_heads, self._head_dim)[:, :length].transpose(1, 2),
            v_XKH.view(num_rows, -1, self._num_kv_heads, self._head_dim)[:, :length].transpose(1, 2),
            attn_mask=group.bias_R11L,
            scale=self._scale,
        )
        return out_RKGH.reshape(num_rows, self._num_heads, self._head_dim)

    def _attend_chunk(self, q_TNH: Tensor, k_LKH: Tensor, v_LKH: Tensor, bias_TL: Tensor | None) -> Tensor:
        """-> out_TNH. q is seen as [G, K, T, H], k and v as [G, K, L, H] with stride 0 over G."""
        grouped = q_TNH.view(len(q_TNH), self._num_kv_heads, self._num_groups, self._head_dim)
        out_GKTH = scaled_dot_product_attention(
            grouped.permute(2, 1, 0, 3),
            k_LKH.transpose(0, 1).expand(self._num_groups, -1, -1, -1),
            v_LKH.transpose(0, 1).expand(self._num_groups, -1, -1, -1),
            attn_mask=bias_TL,
            is_causal=bias_TL is None,
            scale=self._scale,
        )
        return out_GKTH.permute(2, 1, 0, 3).reshape(q_TNH.shape)

    def _gather(self, k_cache_CKH: Tensor, v_cache_CKH: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of `pages`, in order: views of the workspaces, [tokens of the pages, K, H], valid until the next call.

        Reused because a fresh tensor of this size costs more in page faults than in copying (7.7 ms against 0.8 for 12 MB).
        """
        page_values = self._page_size * self._num_kv_heads * self._head_dim
        if self._workspaces is None or self._workspaces[0].numel() < len(pages) * page_values:
            self._workspaces = (
                k_cache_CKH.new_empty(len(pages) * page_values),
                v_cache_CKH.new_empty(len(pages) * page_values),
            )
        k_work, v_work = (work[: len(pages) * page_values] for work in self._workspaces)
        torch.index_select(k_cache_CKH.view(-1, page_values), 0, pages, out=k_work.view(-1, page_values))
        torch.index_select(v_cache_CKH.view(-1, page_values), 0, pages, out=v_work.view(-1, page_values))
        shape = (len(pages) * self._page_size, self._num_kv_heads, self._head_dim)
        return k_work.view(shape), v_work.view(shape)


def split_rows(rows: np.ndarray, contexts_B: np.ndarray, group_tokens: int) -> list[np.ndarray]:
    """Rows in groups of similar context: at most `group_tokens` padded tokens (one row may exceed it) and MAX_PADDING per row.
    Ascending within a group."""
    ordered = rows[np.argsort(-contexts_B[rows], kind="stable")]
    groups: list[np.ndarray] = []
    begin = 0
    for index, context in enumerate(contexts_B[ordered].tolist()):
        longest = int(contexts_B[ordered[begin]])
        if (index - begin + 1) * longest > group_tokens or longest - context > MAX_PADDING:
            if index > begin:
                groups.append(np.sort(ordered[begin:index]))
            begin = index
    if len(ordered) > begin:
        groups.append(np.sort(ordered[begin:]))
    return groups


def _token_index(tokens_R: np.ndarray, device: torch.device) -> slice | Tensor:
    """A slice where the tokens are neighbours (always, when one group holds all decode rows)."""
    first, last = int(tokens_R[0]), int(tokens_R[-1])
    return slice(first, last + 1) if last - first + 1 == len(tokens_R) else _to_device(tokens_R, device)


def _to_device(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
