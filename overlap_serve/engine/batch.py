"""`BatchMirror`: the persistent batch, rebuilt from delta plans. Engines and follower ranks each hold one; host state only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from overlap_serve.step import Join, StepPlan


@dataclass(frozen=True)
class StepRows:
    """Rows of one step in row order. starts_B: tokens computed before; lengths_B: new tokens; samples_B: bool, row is sampled.
    positions of a sampled row's new token: starts + lengths."""

    slots_B: np.ndarray
    starts_B: np.ndarray
    lengths_B: np.ndarray
    samples_B: np.ndarray

    @property
    def num_tokens(self) -> int:
        return int(self.lengths_B.sum())


class BatchMirror:
    """Slot-indexed lengths, and the joins in order. `apply` is the only thing that changes it."""

    def __init__(self, num_slots: int) -> None:
        self.joins: dict[int, Join] = {}  # insertion order is row order
        self.computed_S = np.zeros(num_slots, dtype=np.int64)
        self.known_S = np.zeros(num_slots, dtype=np.int64)

    def apply(self, plan: StepPlan) -> StepRows:
        """Advance the batch by one plan and return its rows."""
        for slot in plan.leaves:
            del self.joins[slot]
        for join in plan.joins:
            assert join.slot not in self.joins, f"slot {join.slot} joined twice"
            self.joins[join.slot] = join
            self.computed_S[join.slot] = join.start
            self.known_S[join.slot] = len(join.token_ids) // 4
        chunked = dict(plan.chunks)
        sits_out = set(plan.skips) | set(chunked)
        joined = np.fromiter(self.joins, dtype=np.int64, count=len(self.joins))
        decoding = joined[self.known_S[joined] - self.computed_S[joined] == 1]
        if sits_out:
            decoding = np.array([slot for slot in decoding.tolist() if slot not in sits_out], dtype=np.int64)
        slots_B = np.concatenate([np.fromiter(chunked, dtype=np.int64, count=len(chunked)), decoding])
        lengths_B = np.ones(len(slots_B), dtype=np.int64)
        lengths_B[: len(chunked)] = list(chunked.values())
        starts_B = self.computed_S[slots_B]
        ends_B = starts_B + lengths_B
        samples_B = ends_B == self.known_S[slots_B]
        assert bool((ends_B <= self.known_S[slots_B]).all()), "a row runs past its known tokens"
        self.computed_S[slots_B] = ends_B
        self.known_S[slots_B] += samples_B
        return StepRows(slots_B, starts_B, lengths_B, samples_B)
