"""Sampling parameters by slot, and which of a step's rows ask for what. Host state, numpy only.

`SlotParams` is written at join and read at every step; nothing ends at leave, because a slot is written anew before it is used
again. Rows are grouped here so that the sampler touches a row only for what the row itself asks.

R sampled rows, S slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from overlap_serve.engine.philox import uniforms
from overlap_serve.step import Join

A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True)
class Groups(Generic[A]):
    """Arrays of each feature, in the field order of the sampler's BiasRows, EndRows, PenaltyRows and DrawRows; None: no row asks.

    The same record serves as numpy arrays, as places in a step buffer and as device tensors. All groups None: every row is greedy.
    """

    bias: tuple[A, ...] | None = None
    ends: tuple[A, ...] | None = None
    penalties: tuple[A, ...] | None = None
    greedy: tuple[A] | None = None
    plain: tuple[A, ...] | None = None
    top_k: tuple[A, ...] | None = None
    top_p: tuple[A, ...] | None = None
    history_length: int = 0
    max_top_k: int = 0

    def map(self, convert: Callable[[A], B]) -> Groups[B]:
        def each(group: tuple[A, ...] | None) -> tuple[B, ...] | None:
            return None if group is None else tuple(convert(array) for array in group)

        return Groups(
            bias=each(self.bias),
            ends=each(self.ends),
            penalties=each(self.penalties),
            greedy=None if self.greedy is None else (convert(self.greedy[0]),),
            plain=each(self.plain),
            top_k=each(self.top_k),
            top_p=each(self.top_p),
            history_length=self.history_length,
            max_top_k=self.max_top_k,
        )


class SlotParams:
    """Parameters of whatever request holds a slot. Ids at or above num_valid_ids are dropped: no such id can be sampled."""

    def __init__(self, num_slots: int, num_valid_ids: int) -> None:
        self._num_valid_ids = num_valid_ids
        self._simple_S = np.ones(num_slots, dtype=bool)  # greedy, and changes no logits
        self._greedy_S = np.ones(num_slots, dtype=bool)
        self._penalized_S = np.zeros(num_slots, dtype=bool)
        self._seed_S = np.zeros(num_slots, dtype=np.int64)
        self._choice_S = np.zeros(num_slots, dtype=np.int64)
        self._top_k_S = np.zeros(num_slots, dtype=np.int64)
        self._prompt_length_S = np.zeros(num_slots, dtype=np.int64)
        self._min_tokens_S = np.zeros(num_slots, dtype=np.int64)
        self._draw_3S = np.zeros((3, num_slots), dtype=np.float64)  # temperature, top_p, min_p
        self._penalty_3S = np.zeros((3, num_slots), dtype=np.float32)  # repetition, presence, frequency
        # Only slots that use the feature have an entry.
        self._bias: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._ends: dict[int, np.ndarray] = {}
        self._logprobs: dict[int, int] = {}  # top tokens to report
        self._prompt_logprobs: dict[int, int] = {}

    def join(self, join: Join) -> None:
        slot, sampling = join.slot, join.sampling
        self._seed_S[slot] = sampling.seed
        self._choice_S[slot] = join.choice
        self._top_k_S[slot] = sampling.top_k if sampling.top_k < self._num_valid_ids else 0
        self._prompt_length_S[slot] = join.prompt_len
        self._min_tokens_S[slot] = sampling.min_tokens
        self._draw_3S[:, slot] = (sampling.temperature, sampling.top_p, sampling.min_p)
        self._penalty_3S[:, slot] = (
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
        self._bias.pop(slot, None)
        self._ends.pop(slot, None)
        bias_ids = self._valid(sampling.logit_bias)
        if bias_ids:
            values = np.array([sampling.logit_bias[token] for token in bias_ids], dtype=np.float32)
            self._bias[slot] = (np.array(bias_ids, dtype=np.int64), values)
        end_ids = self._valid(sorted(set(sampling.end_token_ids()))) if sampling.min_tokens > 0 else []
        if end_ids:
            self._ends[slot] = np.array(end_ids, dtype=np.int64)
        self._greedy_S[slot] = sampling.greedy
        self._penalized_S[slot] = sampling.has_penalties
        self._simple_S[slot] = sampling.greedy and not (sampling.has_penalties or bias_ids or end_ids)
        for asks, num_top in ((self._logprobs, sampling.logprobs), (self._prompt_logprobs, sampling.prompt_logprobs)):
            asks.pop(slot, None)
            if num_top >= 0:
                asks[slot] = min(num_top, self._num_valid_ids)

    def groups(self, slots_R: np.ndarray, positions_R: np.ndarray) -> Groups[np.ndarray]:
        """Sort sampled rows by what they ask. positions_R: of the tokens to be sampled; as many tokens are known."""
        if self._simple_S[slots_R].all():
            return Groups()
        greedy_R, top_k_R = self._greedy_S[slots_R], self._top_k_S[slots_R]
        nucleus_R = self._draw_3S[1, slots_R] < 1.0
        penalized = np.flatnonzero(self._penalized_S[slots_R])

        def draw(chosen_R: np.ndarray) -> tuple[np.ndarray, ...] | None:
            rows = np.flatnonzero(~greedy_R & chosen_R)
            return self._draw_rows(rows, slots_R[rows], positions_R[rows]) if len(rows) else None

        return Groups(
            bias=self._bias_rows(slots_R),
            ends=self._end_rows(slots_R, positions_R),
            penalties=self._penalty_rows(penalized, slots_R[penalized], positions_R[penalized]),
            greedy=(np.flatnonzero(greedy_R),) if greedy_R.any() and not greedy_R.all() else None,
            plain=draw((top_k_R == 0) & ~nucleus_R),
            top_k=draw(top_k_R > 0),
            top_p=draw((top_k_R == 0) & nucleus_R),
            history_length=int(positions_R[penalized].max(initial=0)),
            max_top_k=int(top_k_R.max()),
        )

    def logprob_rows(self, slots_R: np.ndarray) -> tuple[list[int], list[int]]:
        """Sampled rows that ask for logprobs, and how many top tokens each reports."""
        if not self._logprobs:
            return [], []
        asks = [(row, self._logprobs[slot]) for row, slot in enumerate(slots_R.tolist()) if slot in self._logprobs]
        return [row for row, _ in asks], [num_top for _, num_top in asks]

    def prompt_logprob_rows(self, slots_B: np.ndarray) -> list[tuple[int, int, int]]:
        """(row, prompt length, top tokens to report) of rows that ask for logprobs of their prompt."""
        if not self._prompt_logprobs:
            return []
        asks = ((row, slot, self._prompt_logprobs.get(slot)) for row, slot in enumerate(slots_B.tolist()))
        return [(row, int(self._prompt_length_S[slot]), num) for row, slot, num in asks if num is not None]

    def _valid(self, ids: Iterable[int]) -> list[int]:
        return [token for token in ids if 0 <= token < self._num_valid_ids]

    def _draw_rows(self, rows: np.ndarray, slots_B: np.ndarray, positions_B: np.ndarray) -> tuple[np.ndarray, ...]:
        noise_B = uniforms(self._seed_S[slots_B], self._choice_S[slots_B], positions_B)
        temperature_B, top_p_B, min_p_B = self._draw_3S[:, slots_B]
        return rows, self._top_k_S[slots_B], noise_B, temperature_B, top_p_B, min_p_B

    def _penalty_rows(
        self, rows: np.ndarray, slots_B: np.ndarray, positions_B: np.ndarray
    ) -> tuple[np.ndarray, ...] | None:
        if not len(rows):
            return None
        return rows, slots_B, positions_B, self._prompt_length_S[slots_B], *self._penalty_3S[:, slots_B]

    def _bias_rows(self, slots_R: np.ndarray) -> tuple[np.ndarray, ...] | None:
        if not self._bias:
            return None
        entries = [(row, *self._bias[slot]) for row, slot in enumerate(slots_R.tolist()) if slot in self._bias]
        if not entries:
            return None
        rows, ids, values = zip(*entries, strict=True)
        return np.repeat(np.array(rows), [len(i) for i in ids]), np.concatenate(ids), np.concatenate(values)

    def _end_rows(self, slots_R: np.ndarray, positions_R: np.ndarray) -> tuple[np.ndarray, ...] | None:
        if not self._ends:
            return None
        short_R = positions_R - self._prompt_length_S[slots_R] < self._min_tokens_S[slots_R]
        rows = [row for row in np.flatnonzero(short_R).tolist() if int(slots_R[row]) in self._ends]
        if not rows:
            return None
        ids = [self._ends[int(slots_R[row])] for row in rows]
        return np.array(rows), np.repeat(np.arange(len(rows)), [len(i) for i in ids]), np.concatenate(ids)
