"""What a step needs on the device, built on the host and sent in one copy.

Owns the ring's step-private buffers (invariant 2: whatever two streams touch belongs to one step) and the number of pages in
each slot's table row. Never sees a request: only joins and rows. The one idea: a step's arrays are gathered by numpy from
slot-indexed ones and packed into one buffer, so steady-state decode is one copy and runs no Python per row.

B rows of the step, T its tokens, R sampled rows, A places to score, S slots, P pages per slot, M places of a token pool row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from overlap_serve.attention.base import RowLayout
from overlap_serve.device.base import Device
from overlap_serve.engine import logprobs
from overlap_serve.engine.batch import StepRows
from overlap_serve.engine.kv_pool import JoinDelta, PoolDelta
from overlap_serve.engine.params import Groups, SlotParams
from overlap_serve.step import StepPlan

WORD_BYTES = 8
FIRST_CAPACITY = 8192  # words

TORCH_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.float32): torch.float32,
}


class Span(NamedTuple):
    """Place of one array in a step buffer."""

    begin: int  # word
    length: int
    dtype: torch.dtype


class Packer:
    """Collects a step's arrays and gives each its place, aligned to words."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []
        self.begins: list[int] = []
        self.num_words = 0

    def add(self, array: np.ndarray) -> Span:
        span = Span(self.num_words, len(array), TORCH_DTYPES[array.dtype])
        self.arrays.append(array)
        self.begins.append(span.begin)
        self.num_words += num_words(array.nbytes)
        return span


class StepBuffer:
    """Memory of one step in flight: inputs on host and device, sampled ids and scores on the host. Reused when `in_flight` is
    false. scores_host: words of `logprobs`, first of prompt tokens, then of sampled rows."""

    def __init__(self, device: Device, max_rows: int) -> None:
        self.in_flight = False
        self.ids_host = device.host_buffer((max_rows,), torch.int32)
        self.scores_host = device.host_buffer((max_rows * logprobs.num_words(logprobs.MAX_TOP),), torch.int32)
        self._device = device
        self._num_words = 0
        self._grow(FIRST_CAPACITY)

    def fill(self, packer: Packer) -> None:
        """Copy the arrays in; host memory only."""
        if packer.num_words > len(self._host):
            self._grow(2 * packer.num_words)
        self._num_words = packer.num_words
        words = self._host.numpy()
        for array, begin in zip(packer.arrays, packer.begins, strict=True):
            words[begin : begin + num_words(array.nbytes)].view(array.dtype)[: len(array)] = array

    def reserve_scores(self, num_words: int) -> None:
        """Room for the words that the step's result will bring; only prompts need more than there is from the start."""
        if num_words > len(self.scores_host):
            self.scores_host = self._device.host_buffer((2 * num_words,), torch.int32)

    def upload(self) -> None:
        """Work of the scheduler stream."""
        self._on_device[: self._num_words].copy_(self._host[: self._num_words], non_blocking=True)

    def view(self, span: Span) -> Tensor:
        """The array on the device; valid after `upload`, until the step's result is taken."""
        end = span.begin + num_words(span.length * span.dtype.itemsize)
        return self._on_device[span.begin : end].view(span.dtype)[: span.length]

    def _grow(self, capacity: int) -> None:
        # Safe while nothing is in flight: the old memory has no reader.
        self._host = self._device.host_buffer((capacity,), torch.int64)
        self._on_device = torch.empty(capacity, dtype=torch.int64, device=self._device.torch_device)


def num_words(num_bytes: int) -> int:
    return -(-num_bytes // WORD_BYTES)


class PoolSpans(NamedTuple):
    """The arrays of a `PoolDelta`."""

    join_tokens: Span
    join_pages: Span
    page_places: Span
    new_pages: Span


@dataclass(frozen=True)
class Scores:
    """Places whose tokens get logprobs. nums: top tokens that each reports; the device finds as many for all as one asks for.
    begin: of the words in `StepBuffer.scores_host`."""

    at_A: Span
    nums: tuple[int, ...]
    begin: int

    @property
    def num_top(self) -> int:
        return max(self.nums)

    @property
    def num_words(self) -> int:
        return len(self.nums) * logprobs.num_words(self.num_top)

    def host_words(self, buffer: StepBuffer) -> Tensor:
        """-> words_AW, where they arrive on the host."""
        return buffer.scores_host[self.begin : self.begin + self.num_words].view(len(self.nums), -1)


@dataclass(frozen=True)
class SampledScores(Scores):
    """at_A: rows among the sampled ones, `rows` on the host; their ids are sampled in this step."""

    rows: tuple[int, ...]


@dataclass(frozen=True)
class PromptScores(Scores):
    """at_A: the predicting tokens among the step's. targets_A: places of the predicted ones in the token pool. parts: (slot, number
    of places), in order."""

    targets_A: Span
    parts: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class StepInputs:
    """One launched step, as its work functions see it. Spans are read on the engine stream, after the upload.

    places_T: in the token pool, of the input ids. last_R: each sampled row's last token among the step's tokens; None if every
    token is one. new_places_R: in the token pool, of the ids to be sampled. prompt_scores, sampled_scores: None if no row asks.
    """

    step: int
    buffer: StepBuffer
    layout: RowLayout
    num_tokens: int
    num_sampled: int
    joins: tuple[JoinDelta, ...]
    pool: PoolSpans | None
    places_T: Span
    positions_T: Span
    last_R: Span | None
    new_places_R: Span
    groups: Groups[Span]
    prompt_scores: PromptScores | None
    sampled_scores: SampledScores | None

    def pool_delta(self) -> PoolDelta | None:
        return None if self.pool is None else PoolDelta(self.joins, *(self.buffer.view(span) for span in self.pool))


class InputBuilder:
    """Host state behind the inputs: sampling parameters and page counts by slot."""

    def __init__(self, *, num_slots: int, pages_per_slot: int, max_tokens: int, num_valid_ids: int) -> None:
        self._params = SlotParams(num_slots, num_valid_ids)
        self._num_pages_S = np.zeros(num_slots, dtype=np.int64)
        self._pages_per_slot = pages_per_slot
        self._max_tokens = max_tokens

    def build(self, plan: StepPlan, rows: StepRows, buffer: StepBuffer) -> StepInputs:
        """Advance the slots' state by the plan and fill `buffer`, which must not be in flight."""
        packer = Packer()
        joins, pool = self._pool_changes(plan, packer)
        slots_T, positions_T = _tokens(rows)
        sampled = np.flatnonzero(rows.samples_B)
        slots_R = rows.slots_B[sampled]
        new_positions_R = (rows.starts_B + rows.lengths_B)[sampled]
        last_R = None
        if len(sampled) < len(slots_T):
            last_R = packer.add(np.cumsum(rows.lengths_B)[sampled] - 1)
        prompt_scores = self._prompt_scores(rows, len(plan.chunks), packer) if plan.chunks else None
        sampled_scores = self._sampled_scores(slots_R, packer, 0 if prompt_scores is None else prompt_scores.num_words)
        inputs = StepInputs(
            step=plan.step,
            buffer=buffer,
            layout=RowLayout(rows.slots_B, rows.starts_B, rows.lengths_B),
            num_tokens=len(slots_T),
            num_sampled=len(sampled),
            joins=joins,
            pool=pool,
            places_T=packer.add(slots_T * self._max_tokens + positions_T),
            positions_T=packer.add(positions_T),
            last_R=last_R,
            new_places_R=packer.add(slots_R * self._max_tokens + new_positions_R),
            groups=self._params.groups(slots_R, new_positions_R).map(packer.add),
            prompt_scores=prompt_scores,
            sampled_scores=sampled_scores,
        )
        buffer.fill(packer)
        for scores in (prompt_scores, sampled_scores):
            if scores is not None:
                buffer.reserve_scores(scores.begin + scores.num_words)
        return inputs

    def _sampled_scores(self, slots_R: np.ndarray, packer: Packer, begin: int) -> SampledScores | None:
        rows, nums = self._params.logprob_rows(slots_R)
        return SampledScores(packer.add(np.array(rows)), tuple(nums), begin, tuple(rows)) if rows else None

    def _prompt_scores(self, rows: StepRows, num_chunks: int, packer: Packer) -> PromptScores | None:
        """The prompt tokens that follow a token of a chunk. The one after the last chunk is none of them: it is sampled."""
        first_B = np.cumsum(rows.lengths_B) - rows.lengths_B
        at, targets, nums, parts = [], [], [], []
        for row, prompt_len, num in self._params.prompt_logprob_rows(rows.slots_B[:num_chunks]):
            slot, start = int(rows.slots_B[row]), int(rows.starts_B[row])
            count = min(start + int(rows.lengths_B[row]), prompt_len - 1) - start
            if count > 0:
                at.append(first_B[row] + np.arange(count))
                targets.append(slot * self._max_tokens + start + 1 + np.arange(count))
                nums += [num] * count
                parts.append((slot, count))
        if not parts:
            return None
        at_A, targets_A = packer.add(np.concatenate(at)), packer.add(np.concatenate(targets))
        return PromptScores(at_A, tuple(nums), 0, targets_A, tuple(parts))

    def _pool_changes(self, plan: StepPlan, packer: Packer) -> tuple[tuple[JoinDelta, ...], PoolSpans | None]:
        if not plan.joins and not plan.new_pages:
            return (), None
        deltas: list[JoinDelta] = []
        num_tokens = num_pages = 0
        for join in plan.joins:
            self._params.join(join)
            self._num_pages_S[join.slot] = len(join.pages)
            end_tokens, end_pages = num_tokens + len(join.token_ids) // 4, num_pages + len(join.pages)
            deltas.append(JoinDelta(join.slot, slice(num_tokens, end_tokens), slice(num_pages, end_pages)))
            num_tokens, num_pages = end_tokens, end_pages
        tokens = np.frombuffer(b"".join(join.token_ids for join in plan.joins), dtype=np.int32)
        pages = np.array([page for join in plan.joins for page in join.pages], dtype=np.int32)
        spans = PoolSpans(
            join_tokens=packer.add(tokens),
            join_pages=packer.add(pages),
            page_places=packer.add(np.array([self._next_place(slot) for slot, _ in plan.new_pages], dtype=np.int64)),
            new_pages=packer.add(np.array([page for _, page in plan.new_pages], dtype=np.int32)),
        )
        return tuple(deltas), spans

    def _next_place(self, slot: int) -> int:
        """Take the next free place of the slot's page table row."""
        index = int(self._num_pages_S[slot])
        assert index < self._pages_per_slot, f"slot {slot} got more than {self._pages_per_slot} pages"
        self._num_pages_S[slot] += 1
        return slot * self._pages_per_slot + index


def _tokens(rows: StepRows) -> tuple[np.ndarray, np.ndarray]:
    """slots_T and positions_T of the step's tokens, in row order."""
    if (rows.lengths_B == 1).all():
        return rows.slots_B, rows.starts_B
    first_B = np.cumsum(rows.lengths_B) - rows.lengths_B
    positions_T = np.arange(rows.num_tokens) - np.repeat(first_B - rows.starts_B, rows.lengths_B)
    return np.repeat(rows.slots_B, rows.lengths_B), positions_T
