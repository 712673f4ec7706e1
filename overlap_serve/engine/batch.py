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
    """Slot-indexed lengths, and the joins in order. `apply` is the only thing that changes it.

    joins: by slot; a new dict whenever it changes, so a step in flight may keep the one it was launched with. Steps in which nobody
    comes or goes cost a few numpy operations, whatever the number of rows.
    """

    def __init__(self, num_slots: int) -> None:
        self.joins: dict[int, Join] = {}  # insertion order is row order
        self._joined = np.empty(0, dtype=np.int64)  # its keys
        self.computed_S = np.zeros(num_slots, dtype=np.int64)
        self.known_S = np.zeros(num_slots, dtype=np.int64)

    def apply(self, plan: StepPlan) -> StepRows:
        """Advance the batch by one plan and return its rows."""
        if plan.leaves or plan.joins:
            self._change(plan)
        joined = self._joined
        slots_B = joined[self.known_S[joined] - self.computed_S[joined] == 1]
        if plan.chunks or plan.skips:
            chunked = np.array([slot for slot, _ in plan.chunks], dtype=np.int64)
            decoding = slots_B[~np.isin(slots_B, np.concatenate([chunked, np.array(plan.skips, dtype=np.int64)]))]
            slots_B = np.concatenate([chunked, decoding])
        lengths_B = np.ones(len(slots_B), dtype=np.int64)
        lengths_B[: len(plan.chunks)] = [length for _, length in plan.chunks]
        starts_B = self.computed_S[slots_B]
        ends_B = starts_B + lengths_B
        samples_B = ends_B == self.known_S[slots_B]
        assert bool((ends_B <= self.known_S[slots_B]).all()), "a row runs past its known tokens"
        self.computed_S[slots_B] = ends_B
        self.known_S[slots_B] += samples_B
        return StepRows(slots_B, starts_B, lengths_B, samples_B)

    def _change(self, plan: StepPlan) -> None:
        joins = dict(self.joins)
        for slot in plan.leaves:
            del joins[slot]
        for join in plan.joins:
            assert join.slot not in joins, f"slot {join.slot} joined twice"
            joins[join.slot] = join
            self.computed_S[join.slot] = join.start
            self.known_S[join.slot] = len(join.token_ids) // 4
        self.joins = joins
        self._joined = np.fromiter(joins, dtype=np.int64, count=len(joins))
