"""Logprobs through scheduler and cache, on rig S: complete, once, and the same whatever happens to the request.

`run_case` itself compares every value with the oracle's; these tests bring about the situations and check what it cannot see.
"""

from __future__ import annotations

import pytest

from overlap_serve.cache.radix import RadixCache
from overlap_serve.messages import AbortRequest, Message
from overlap_serve.sampling import TokenLogprob
from overlap_serve.scheduler.limits import Limits
from overlap_serve.scheduler.scheduler import Scheduler
from overlap_serve.step import StepResult
from tests.scheduler_rig import Case, Run, make_limits, make_request, run_case

BOTH_DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(i * 7 + salt * 31) % 250 for i in range(length)]


def run(limits: Limits, script: list[tuple[int, Message]], depth: int, **fields: object) -> Run:
    return run_case(Case(limits, script, **fields), depth, "lazy")  # type: ignore[arg-type]


class PreemptAt(Scheduler):
    """Everything that runs is preempted when step `at` is planned."""

    at = -1

    def _plan_decode(self):  # type: ignore[no-untyped-def]
        if self._next_step == self.at:
            for req in list(self._running):
                self.counters.preemptions += 1
                self._leave(req)
                if req.inflight == 0:
                    self._release(req)
        return super()._plan_decode()


def test_a22_prompt_logprobs_are_the_same_with_a_cold_and_a_warm_cache() -> None:
    prompt = prompt_of(70)
    got = set()
    for depth in (0, 1):
        for chunk in (3, 64, 100):
            script: list[tuple[int, Message]] = [
                (1, make_request("cold", prompt, 6, prompt_logprobs=2, logprobs=1)),
                (100, make_request("half", [*prompt[:35], *prompt_of(30, 5)], 6)),
                (200, make_request("warm", prompt, 6, prompt_logprobs=2, logprobs=1)),
                (300, make_request("same", prompt, 6)),
            ]
            done = run(make_limits(page_size=4, max_step_tokens=chunk), script, depth)
            for rid in ("cold", "warm"):
                assert len(done.ledger.prompt_logprobs[rid, 0]) == len(prompt)
                got.add((done.ledger.prompt_logprobs[rid, 0], tuple(done.ledger.logprobs[rid, 0])))
            assert (
                done.scheduler.counters.hit_tokens == 32 + 68
            )  # of "half" and "same": others still profit from its pages
            assert done.scheduler.counters.queried_tokens == 65 + 70
    assert len(got) == 1
    [(prompt_logprobs, logprobs)] = got
    assert prompt_logprobs[0] == TokenLogprob(prompt[0], None, ())
    assert [entry.token_id for entry in prompt_logprobs] == prompt
    assert {len(entry.top) for entry in prompt_logprobs[1:]} == {2} and {len(entry.top) for entry in logprobs} == {1}


@BOTH_DEPTHS
@pytest.mark.parametrize("chunk", [4, 7, 64])
@pytest.mark.parametrize("cache", ["radix", "none"])
def test_preemption_at_every_step_reports_each_token_once(depth: int, chunk: int, cache: str) -> None:
    request = make_request("r", prompt_of(21), 12, prompt_logprobs=1, logprobs=1)
    others: list[tuple[int, Message]] = [(0, make_request("other", prompt_of(21), 9, logprobs=0))]
    for step in range(20):
        PreemptAt.at = step
        case = Case(make_limits(page_size=4, max_step_tokens=chunk), [(0, request), *others], cache)
        done = run_case(case, depth, "eager", scheduler_class=PreemptAt)
        assert len(done.ledger.prompt_logprobs["r", 0]) == 21
        assert len(done.ledger.logprobs["r", 0]) == 12 and len(done.ledger.logprobs["other", 0]) == 9


def test_what_is_reported_already_is_taken_from_the_cache_after_a_preemption() -> None:
    for step, hits in ((0, 0), (3, 12), (6, 20), (9, 24)):
        PreemptAt.at = step
        request = make_request("r", prompt_of(21), 12, prompt_logprobs=1)
        case = Case(make_limits(page_size=4, max_step_tokens=4), [(0, request)])
        done = run_case(case, 0, "lazy", scheduler_class=PreemptAt)
        assert done.scheduler.counters.preemptions == (step > 0)
        assert done.scheduler.counters.hit_tokens == hits, step


@BOTH_DEPTHS
def test_only_choice_0_computes_and_reports_the_prompt(depth: int) -> None:
    request = make_request("r", prompt_of(64), 5, n=4, temperature=1.0, prompt_logprobs=3, logprobs=2)
    done = run(make_limits(page_size=16), [(1, request)], depth)
    assert list(done.ledger.prompt_logprobs) == [("r", 0)]
    assert [len(entries) for entries in done.ledger.logprobs.values()] == [5] * 4
    assert done.scheduler.counters.hit_tokens == 3 * 48


@BOTH_DEPTHS
@pytest.mark.parametrize("length", [1, 2, 30])
def test_prompt_logprobs_come_with_the_first_output_also_if_it_is_the_last(depth: int, length: int) -> None:
    done = run(make_limits(), [(1, make_request("r", prompt_of(length), 1, prompt_logprobs=0))], depth)
    end = done.ledger.finish["r", 0]
    assert end.open is not None and end.prompt_logprobs is not None and len(end.prompt_logprobs) == length
    assert end.logprobs == ()


@BOTH_DEPTHS
def test_a_request_that_ends_within_its_prompt_reports_none_of_it(depth: int) -> None:
    for at in range(1, 12):
        script: list[tuple[int, Message]] = [
            (1, make_request("r", prompt_of(40), 9, prompt_logprobs=1)),
            (at, AbortRequest("r", "client")),
        ]
        ledger = run(make_limits(max_step_tokens=8), script, depth).ledger
        assert (("r", 0) in ledger.prompt_logprobs) == bool(ledger.tokens["r", 0])


def test_rows_that_ask_for_nothing_join_with_nothing() -> None:
    """The engine is told to score a prompt by the row that joins: choice 0, while its prompt is not complete."""
    scheduler = Scheduler(make_limits(page_size=4), RadixCache(4))
    scheduler.handle(make_request("r", prompt_of(9), 4, n=2, prompt_logprobs=1, logprobs=1), 0.0)
    first = scheduler.plan(0.0)
    assert first is not None and [join.sampling.prompt_logprobs for join in first.joins] == [1]
    entries = tuple(TokenLogprob(token, -1.0) for token in prompt_of(9)[1:])
    slot = first.joins[0].slot
    result = StepResult(first.step, (7,), (TokenLogprob(7, -2.0),), ((slot, entries),))
    [(_, output)] = scheduler.apply(result, 0.0).tokens
    assert output.prompt_logprobs == (TokenLogprob(prompt_of(9)[0], None), *entries)
    assert output.logprobs == (TokenLogprob(7, -2.0),)
    second = scheduler.plan(0.0)
    assert second is not None and [(j.choice, j.sampling.prompt_logprobs) for j in second.joins] == [(1, -1)]
    assert second.joins[0].sampling.logprobs == 1
