"""Rig S: 2,000 random runs, each at depth 0 and 1, on threaded and stepped streams; and the faults that it must find."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from overlap_serve.engine.fake import StepInputs
from overlap_serve.messages import Message, TokenOutput
from overlap_serve.scheduler.req import Req
from overlap_serve.scheduler.scheduler import Scheduler
from overlap_serve.step import StepPlan
from tests.scheduler_rig import STREAMS, CheckedEngine, Ledger, random_case, run_case

CASES_PER_TEST = 100


def run_both_depths(seed: int, **classes: object) -> None:
    case = random_case(seed)
    for depth in (0, 1):
        run_case(case, depth, STREAMS[seed % len(STREAMS)], **classes)  # type: ignore[arg-type]


@pytest.mark.parametrize("first", range(0, 2000, CASES_PER_TEST))
def test_random_runs_equal_the_oracle_at_both_depths(first: int) -> None:
    for seed in range(first, first + CASES_PER_TEST):
        run_both_depths(seed)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(10_000, 30_000, 1000))
@pytest.mark.timeout(3600)
def test_soak_random_runs_equal_the_oracle_at_both_depths(first: int) -> None:
    for seed in range(first, first + 1000):
        run_both_depths(seed)


class EarlyRelease(Scheduler):
    """Pages return as soon as the request is over, though a step in flight still holds them."""

    def _leave(self, req: Req) -> None:
        super()._leave(req)
        self._pages.give(req.pages[req.num_shared :])
        req.pages = req.pages[: req.num_shared]


class PageLeak(Scheduler):
    """One page of every released request is forgotten."""

    def _release(self, req: Req) -> None:
        if len(req.pages) > req.num_shared + 1:
            req.pages.pop()
        super()._release(req)


class UnorderedRows(Scheduler):
    """Rows come from a set, as in mini-sglang #113."""

    def plan(self, now: float) -> StepPlan | None:
        plan = super().plan(now)
        if plan is not None:
            random.Random(plan.step).shuffle(self._inflight[-1].rows)
        return plan


class SideStreamWrites(CheckedEngine):
    """The scheduler stream writes page table and token pool, as in sglang #18803."""

    def prepare(self, inputs: StepInputs, entries: Sequence[tuple[int, int, int]]) -> None:
        self.upload(inputs.plan.joins)
        self.write_pages(entries)


class LostEnd(Ledger):
    """The terminal outputs of one request are lost on the way."""

    def send(self, endpoint: str, messages: list[Message]) -> bool:
        kept = [m for m in messages if not (isinstance(m, TokenOutput) and m.finish and m.rid == "r0")]
        return super().send(endpoint, kept)


@pytest.mark.parametrize(
    "fault",
    [
        {"scheduler_class": EarlyRelease},
        {"scheduler_class": PageLeak},
        {"scheduler_class": UnorderedRows},
        {"engine_class": SideStreamWrites},
        {"ledger_class": LostEnd},
    ],
    ids=lambda fault: next(iter(fault.values())).__name__,
)
def test_planted_fault_is_found(fault: dict[str, object]) -> None:
    with pytest.raises(AssertionError):
        for seed in range(100):
            run_both_depths(seed, **fault)
