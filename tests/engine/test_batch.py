"""The mirror rebuilds the full rows from delta plans; rig S compares them at every step, here are the rules one by one."""

from __future__ import annotations

from overlap_serve.engine.batch import BatchMirror, StepRows
from overlap_serve.messages import pack_ids
from overlap_serve.sampling import SamplingParams
from overlap_serve.step import Join, StepPlan


def join(slot: int, length: int, start: int = 0) -> Join:
    return Join(slot, pack_ids(list(range(length))), length, start, (slot,), SamplingParams(max_tokens=9), 0)


def as_tuples(rows: StepRows) -> list[tuple[int, int, int, bool]]:
    return list(
        zip(
            rows.slots_B.tolist(), rows.starts_B.tolist(), rows.lengths_B.tolist(), rows.samples_B.tolist(), strict=True
        )
    )


def test_chunks_then_decode_rows_in_join_order() -> None:
    mirror = BatchMirror(8)
    assert as_tuples(mirror.apply(StepPlan(0, joins=(join(5, 4), join(2, 6)), chunks=((5, 4), (2, 2))))) == [
        (5, 0, 4, True),
        (2, 0, 2, False),
    ]
    assert as_tuples(mirror.apply(StepPlan(1, chunks=((2, 4),)))) == [(2, 2, 4, True), (5, 4, 1, True)]
    assert as_tuples(mirror.apply(StepPlan(2))) == [(5, 5, 1, True), (2, 6, 1, True)]


def test_skipped_rows_stay_and_leavers_are_gone() -> None:
    mirror = BatchMirror(8)
    mirror.apply(StepPlan(0, joins=(join(0, 2), join(1, 2)), chunks=((0, 2), (1, 2))))
    assert as_tuples(mirror.apply(StepPlan(1, skips=(0,)))) == [(1, 2, 1, True)]
    assert as_tuples(mirror.apply(StepPlan(2, leaves=(1,)))) == [(0, 2, 1, True)]


def test_slot_may_be_left_and_joined_in_one_plan() -> None:
    mirror = BatchMirror(8)
    mirror.apply(StepPlan(0, joins=(join(3, 2),), chunks=((3, 2),)))
    assert as_tuples(mirror.apply(StepPlan(1, leaves=(3,), joins=(join(3, 5, start=4),)))) == [(3, 4, 1, True)]


def test_row_in_prefill_without_a_chunk_waits() -> None:
    mirror = BatchMirror(8)
    mirror.apply(StepPlan(0, joins=(join(0, 9),), chunks=((0, 3),)))
    assert as_tuples(mirror.apply(StepPlan(1))) == []
