"""Rig S: 2,000 random runs, each at depth 0 and 1, on threaded and stepped streams; and the faults that it must find."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from overlap_serve.engine.fake import StepInputs
from overlap_serve.messages import Message, TokenOutput
from overlap_serve.scheduler.req import Req
from overlap_serve.scheduler.scheduler import Scheduler, _Planned
from overlap_serve.step import StepPlan, StepResult
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
        if req.finish is not None and req.inflight:
            held, req.inflight = req.inflight, 0
            self._release(req)
            req.inflight = held


class PageLeak(Scheduler):
    """One page of every released request is forgotten."""

    def _release(self, req: Req) -> None:
        super()._release(req)
        if self._room.pages.num_free:
            self._room.pages.take(1)


class UnorderedRows(Scheduler):
    """Rows come from a set, as in mini-sglang #113."""

    def plan(self, now: float) -> StepPlan | None:
        plan = super().plan(now)
        if plan is not None:
            random.Random(plan.step).shuffle(self._inflight[-1].rows)
        return plan


class WarmPromptLogprobs(Scheduler):
    """Requests for prompt logprobs start behind a cached prefix, whose logprobs nobody computes (vLLM #3251)."""

    def _take_room(self, req: Req) -> bool:
        kept, req.prompt_logprobs = req.prompt_logprobs, None
        taken = super()._take_room(req)
        req.prompt_logprobs = kept
        return taken


class RepeatedPromptLogprobs(Scheduler):
    """A resumed request reports what it computes again."""

    def _keep_prompt_logprobs(self, planned: _Planned, result: StepResult) -> None:
        for req, _ in planned.scoring:
            if req.prompt_logprobs is not None:
                req.prompt_logprobs += dict(result.prompt_logprobs).get(req.slot, ())


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
    ("fault", "words"),
    [
        ({"scheduler_class": EarlyRelease}, "returned under a step in flight"),
        ({"scheduler_class": PageLeak}, "do not add up"),
        ({"scheduler_class": UnorderedRows}, "wrong tokens|rows of plan and mirror differ"),
        ({"scheduler_class": WarmPromptLogprobs}, "logprobs"),
        ({"scheduler_class": RepeatedPromptLogprobs}, "logprobs"),
        ({"engine_class": SideStreamWrites}, "device state touched from 'scheduler'"),
        ({"ledger_class": LostEnd}, "no terminal output"),
    ],
    ids=lambda value: next(iter(value.values())).__name__ if isinstance(value, dict) else "",
)
def test_planted_fault_is_found_by_the_check_that_is_there_for_it(fault: dict[str, object], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        for seed in range(100):
            run_both_depths(seed, **fault)


def test_early_release_is_no_fault_without_overlap() -> None:
    for seed in range(40):
        run_case(random_case(seed), 0, "lazy", scheduler_class=EarlyRelease)
