"""What users of such servers were hit by (pains.md), on rig S; each test is named after what it guards."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys

import msgspec
import pytest

from overlap_serve.cache.radix import RadixCache
from overlap_serve.engine.batch import BatchMirror
from overlap_serve.messages import AbortRequest, Message, pack_ids
from overlap_serve.scheduler.limits import Limits
from overlap_serve.scheduler.scheduler import Scheduler
from overlap_serve.step import StepPlan, StepResult
from tests.scheduler_rig import Case, Run, make_limits, make_request, oracle, random_case, run_case

BOTH_DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(i * 7 + salt * 31) % 250 for i in range(length)]


def run(limits: Limits, script: list[tuple[int, Message]], depth: int, **fields: object) -> Run:
    return run_case(Case(limits, script, **fields), depth, "lazy")  # type: ignore[arg-type]


@BOTH_DEPTHS
@pytest.mark.parametrize("pages", [9, 10, 11])
@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("max_tokens", [1, 15, 16, 17, 200])
def test_a02_prompts_at_the_edge_of_the_pool_end_and_never_loop(
    depth: int, pages: int, offset: int, max_tokens: int
) -> None:
    limits = make_limits(num_pages=10, page_size=16, max_model_len=1600)
    length = pages * 16 + offset
    scheduler = Scheduler(limits, RadixCache(16))
    refused = scheduler.handle(make_request("r", prompt_of(length), max_tokens), 0.0).tokens
    if length + 1 > limits.capacity_tokens:
        assert [o.failure.code for _, o in refused if o.failure] == ["context_length_exceeded"]
        return
    done = run(limits, [(0, make_request("r", prompt_of(length), max_tokens))], depth, round_limit=10_000)
    assert done.ledger.finish["r", 0].finish == "length"
    assert len(done.ledger.tokens["r", 0]) == min(max_tokens, limits.capacity_tokens - length)


def test_a02_prompt_as_long_as_the_model_is_refused_at_once() -> None:
    scheduler = Scheduler(make_limits(max_model_len=64), RadixCache(16))
    for length, accepted in ((63, True), (64, False), (65, False), (256, False)):
        out = scheduler.handle(make_request(f"r{length}", prompt_of(length), 5), 0.0)
        assert (not out.tokens) == accepted
    assert scheduler.num_waiting == 1


@BOTH_DEPTHS
@pytest.mark.parametrize("chunk", [4, 64])
def test_a05_preemption_at_every_step_keeps_the_token_in_flight_exactly_once(depth: int, chunk: int) -> None:
    class PreemptAt(Scheduler):
        at = -1

        def _plan_decode(self):  # type: ignore[no-untyped-def]
            if self._next_step == self.at:
                for req in list(self._running):
                    self._leave(req)
                    if req.inflight == 0:
                        self._release(req)
            return super()._plan_decode()

    request = make_request("r", prompt_of(21), 40)
    for step in range(45):
        PreemptAt.at = step
        done = run_case(
            Case(make_limits(page_size=4, max_step_tokens=chunk), [(0, request)]),
            depth,
            "eager",
            scheduler_class=PreemptAt,
        )
        assert done.ledger.tokens["r", 0] == oracle(request, 0, make_limits(), 0)[0]


@BOTH_DEPTHS
@pytest.mark.parametrize("chunk", range(11))
@pytest.mark.parametrize("cache", ["radix", "none"])
def test_a08_abort_after_each_chunk_of_a_prefill_returns_every_page(depth: int, chunk: int, cache: str) -> None:
    limits = make_limits(max_step_tokens=8, page_size=16)
    other = make_request("other", prompt_of(5, 1), 12)
    script: list[tuple[int, Message]] = [
        (1, make_request("long", prompt_of(80), 4)),
        (1, other),
        (1 + chunk, AbortRequest("long", "client")),
    ]
    done = run(limits, script, depth, cache=cache)  # page identities are checked at every round and at rest
    assert done.ledger.finish["long", 0].finish == "abort"
    assert done.ledger.tokens["other", 0] == oracle(other, 0, limits, 0)[0]


@BOTH_DEPTHS
def test_a07_abort_at_any_round_ends_the_request_and_frees_everything(depth: int) -> None:
    for at in range(1, 60):
        script: list[tuple[int, Message]] = [
            (1, make_request("victim", prompt_of(30), 20, n=2)),
            (1, make_request("other", prompt_of(30), 20)),
            (at, AbortRequest("victim", "client")),
        ]
        done = run(make_limits(page_size=4, max_step_tokens=8, num_slots=2), script, depth)
        assert {end.finish for key, end in done.ledger.finish.items() if key[0] == "victim"} <= {"abort", "length"}
        assert done.scheduler.at_rest


@BOTH_DEPTHS
def test_a10_decode_gap_is_bounded_under_an_endless_stream_of_long_prompts(depth: int) -> None:
    limits = make_limits(max_step_tokens=16, num_pages=400, num_slots=4)
    script: list[tuple[int, Message]] = [(1, make_request("decode", prompt_of(4), 60))]
    script += [(2 + i, make_request(f"p{i}", prompt_of(90, i), 1)) for i in range(60)]
    done = run(limits, script, depth)
    rounds = done.ledger.rounds["decode", 0]
    assert max(b - a for a, b in itertools.pairwise(rounds)) <= 1 + limits.max_decode_gap_steps


@BOTH_DEPTHS
def test_a10_prefill_wait_is_bounded_beside_64_decoding_requests(depth: int) -> None:
    limits = make_limits(max_step_tokens=64, num_slots=65, num_pages=1000, max_prefill_wait_steps=8)
    script: list[tuple[int, Message]] = [(1, make_request(f"d{i}", prompt_of(2, i), 80)) for i in range(64)]
    script.append((12, make_request("late", prompt_of(8), 4)))
    done = run(limits, script, depth)
    assert done.ledger.rounds["late", 0][0] - 12 <= limits.max_prefill_wait_steps + 6


@BOTH_DEPTHS
def test_a11_small_requests_pass_one_that_does_not_fit_but_only_a_bounded_number_of_times(depth: int) -> None:
    limits = make_limits(num_pages=50, page_size=1, num_slots=16, growth_tokens=0, max_bypass=3, max_step_tokens=64)
    script: list[tuple[int, Message]] = [(1, make_request("holder", prompt_of(20), 12))]
    script.append((2, make_request("big", prompt_of(38, 1), 2)))
    script += [(3 + i // 2, make_request(f"s{i}", prompt_of(4, 2 + i), 3)) for i in range(60)]
    done = run(limits, script, depth)
    first = {rid: rounds[0] for (rid, _), rounds in done.ledger.rounds.items()}
    passed = [rid for rid in first if rid.startswith("s") and first[rid] < first["big"]]
    assert 1 <= len(passed) <= limits.max_bypass
    assert first["big"] < first["s10"]


@BOTH_DEPTHS
def test_a12_a_hog_does_not_stop_newcomers(depth: int) -> None:
    limits = make_limits(max_step_tokens=4, num_pages=100, max_model_len=1000)
    script: list[tuple[int, Message]] = [
        (1, make_request("hog", prompt_of(400), 1)),
        (5, make_request("new", prompt_of(1), 3)),
    ]
    done = run(limits, script, depth)
    assert done.ledger.rounds["new", 0][0] - 5 <= 3 + depth


@BOTH_DEPTHS
def test_a13_two_requests_that_need_60_percent_of_the_pool_do_not_thrash(depth: int) -> None:
    limits = make_limits(num_pages=20, page_size=16, max_model_len=1000, growth_tokens=0)
    requests = [make_request(f"r{i}", prompt_of(20, i), 172) for i in range(2)]  # 192 tokens each of 320
    serial = sum(run(limits, [(1, request)], depth).scheduler._next_step for request in requests)
    done = run(limits, [(1, requests[0]), (1, requests[1])], depth)
    assert done.scheduler._next_step <= 1.3 * serial
    assert 0 < done.scheduler.counters.preemptions <= 3


PLAN_HASH = """
import hashlib, msgspec, sys
from tests.scheduler_rig import random_case
from tests.scheduler.test_scheduler import plan_hash
print([plan_hash(random_case(seed)) for seed in range(40)])
"""


def plan_hash(case: Case) -> str:
    """Hash of every plan of a run: what the other ranks would be told."""
    digest = hashlib.sha256()

    class Recorded(Scheduler):
        def plan(self, now: float):  # type: ignore[no-untyped-def]
            plan = super().plan(now)
            digest.update(msgspec.msgpack.encode(plan))
            return plan

    run_case(case, 1, "lazy", scheduler_class=Recorded)
    return digest.hexdigest()


def test_a14_plans_do_not_depend_on_hash_seed_or_process() -> None:
    """Rank 0 decides and the plan is the only thing that crosses; equal messages give equal plans in every process."""
    answers = set()
    for hash_seed in ("0", "1", "12345"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, "-c", PLAN_HASH], env=env, capture_output=True, text=True, check=True)
        answers.add(done.stdout)
    assert len(answers) == 1


def test_a14_followers_that_only_replay_plans_have_the_same_batch_for_10_000_steps() -> None:
    """They see no clock, no message and no memory: rows, aborts, deadlines and preemptions are in the plans, over the wire."""
    num_steps = seed = 0
    while num_steps < 10_000:
        plans: list[bytes] = []

        class Recorded(Scheduler):
            def plan(self, now: float, plans: list[bytes] = plans) -> StepPlan | None:
                plan = super().plan(now)
                if plan is not None:
                    plans.append(msgspec.msgpack.encode(plan))
                return plan

        case = random_case(seed)
        rows_of_rank_0 = run_case(case, 1, "lazy", scheduler_class=Recorded).engine.rows_log
        for _ in range(3):
            mirror = BatchMirror(case.limits.num_slots)
            steps = [mirror.apply(msgspec.msgpack.decode(plan, type=StepPlan)) for plan in plans]
            assert [(r.slots_B.tolist(), r.starts_B.tolist(), r.lengths_B.tolist()) for r in steps] == rows_of_rank_0
        num_steps += len(plans)
        seed += 1


@BOTH_DEPTHS
def test_a17_same_prompt_twice_keeps_its_page_table_and_its_tokens(depth: int) -> None:
    """CheckedEngine asserts that no page table entry changes while its row runs; the second run is a full prefix hit."""
    prompt = prompt_of(64)
    script: list[tuple[int, Message]] = [(1 + 40 * i, make_request(f"r{i}", prompt, 20)) for i in range(2)]
    done = run(make_limits(page_size=16), script, depth)
    assert done.ledger.tokens["r0", 0] == done.ledger.tokens["r1", 0]
    assert done.scheduler.counters.hit_tokens == 48  # a full hit recomputes the last token, so its page is not shared


@BOTH_DEPTHS
@pytest.mark.parametrize("neighbours", [0, 1, 7, 31])
def test_a23_seeded_request_is_the_same_among_any_neighbours(depth: int, neighbours: int) -> None:
    limits = make_limits(num_slots=32, num_pages=60, page_size=4, growth_tokens=0, max_step_tokens=40)
    mine = make_request("mine", prompt_of(10), 20, temperature=1.0, seed=-7)
    script: list[tuple[int, Message]] = [
        (1 + i % 5, make_request(f"n{i}", prompt_of(8, i), 15, temperature=float(i % 2), seed=i))
        for i in range(neighbours)
    ]
    done = run(limits, [*script, (3, mine)], depth)
    assert done.ledger.tokens["mine", 0] == oracle(mine, 0, limits, 0)[0]


@BOTH_DEPTHS
def test_a28_choices_compute_the_prompt_once_and_differ_by_their_noise(depth: int) -> None:
    request = make_request("r", prompt_of(64), 8, n=8, temperature=1.0, seed=5)
    done = run(make_limits(page_size=16, num_slots=8), [(1, request)], depth)
    assert len(done.ledger.finish) == 8
    assert len({tuple(ids) for ids in done.ledger.tokens.values()}) == 8
    assert done.scheduler.counters.hit_tokens == 7 * 48


@BOTH_DEPTHS
def test_length_limit_wastes_no_row_and_an_end_token_wastes_one_at_depth_1(depth: int) -> None:
    by_length = run(make_limits(), [(1, make_request("r", prompt_of(5), 10))], depth)
    assert by_length.scheduler.counters.discarded_tokens == 0
    by_end = run(make_limits(), [(1, make_request("r", prompt_of(5), 500, eos_token_ids=(257,)))], depth, eos_every=9)
    assert by_end.ledger.finish["r", 0].finish == "stop"
    assert by_end.scheduler.counters.discarded_tokens == depth


@BOTH_DEPTHS
def test_deadline_ends_a_request_in_every_state(depth: int) -> None:
    limits = make_limits(num_slots=1, max_step_tokens=4)
    script: list[tuple[int, Message]] = [
        (1, make_request("runs", prompt_of(20), 400, timeout_s=0.02)),
        (1, make_request("waits", prompt_of(20), 4, timeout_s=0.01)),
    ]
    done = run(limits, script, depth)
    assert [(end.finish, end.stop_reason) for end in done.ledger.finish.values()] == [("abort", "deadline")] * 2


@BOTH_DEPTHS
def test_lower_priority_value_goes_first(depth: int) -> None:
    limits = make_limits(num_slots=1)
    script: list[tuple[int, Message]] = [(1, make_request("first", prompt_of(5), 10))]
    script += [(2, make_request(f"p{p}", prompt_of(5, p), 5, priority=p)) for p in (3, -1, 0)]
    done = run(limits, script, depth)
    order = sorted(done.ledger.rounds, key=lambda key: done.ledger.rounds[key][0])
    assert [rid for rid, _ in order] == ["first", "p-1", "p0", "p3"]


def test_rows_that_will_need_a_page_in_the_next_step_are_preempted_for_in_this_one() -> None:
    scheduler = Scheduler(make_limits(num_pages=2, growth_tokens=0), RadixCache(16))
    for rid in ("old", "new"):
        scheduler.handle(make_request(rid, prompt_of(14), 30), 0.0)
    preemptions = []
    for _ in range(3):  # positions 0-13, 14, 15: the next one is on a page that there is not
        plan = scheduler.plan(0.0)
        assert plan is not None
        preemptions.append(scheduler.counters.preemptions)
        scheduler.apply(StepResult(plan.step, (1,) * scheduler.num_running), 0.0)
    assert preemptions == [0, 0, 1]


@BOTH_DEPTHS
def test_oldest_request_always_progresses_under_preemption(depth: int) -> None:
    limits = make_limits(num_pages=12, page_size=4, num_slots=4, growth_tokens=0, max_model_len=100)
    script: list[tuple[int, Message]] = [(1 + i, make_request(f"r{i}", prompt_of(6, i), 38)) for i in range(4)]
    done = run(limits, script, depth)
    assert done.scheduler.counters.preemptions > 0
    rounds = done.ledger.rounds["r0", 0]
    assert max(b - a for a, b in itertools.pairwise(rounds)) <= 2 + depth


def test_cache_salt_separates_equal_prompts() -> None:
    script: list[tuple[int, Message]] = [
        (1, make_request("a", prompt_of(40), 2, cache_salt="a")),
        (30, make_request("b", prompt_of(40), 2, cache_salt="b")),
        (60, make_request("a2", prompt_of(40), 2, cache_salt="a")),
    ]
    done = run(make_limits(), script, 1)
    opened = {key[0]: end for key, end in done.ledger.finish.items()}
    assert set(opened) == {"a", "b", "a2"}
    assert done.scheduler.counters.hit_tokens == 32


def test_resumed_request_goes_on_where_an_earlier_attempt_stopped() -> None:
    whole = make_request("r", prompt_of(20), 30, temperature=1.0, seed=3)
    expected = oracle(whole, 0, make_limits(), 0)[0]
    resumed = make_request("r", prompt_of(20), 30, temperature=1.0, seed=3, generated=(pack_ids(expected[:11]),))
    scheduler = Scheduler(make_limits(), RadixCache(16))
    assert not scheduler.handle(resumed, 0.0).tokens
    plan = scheduler.plan(0.0)
    assert plan is not None
    [(_, output)] = scheduler.apply(StepResult(plan.step, (expected[11],)), 0.0).tokens
    assert (output.first_index, output.token_ids) == (11, (expected[11],))
    assert output.open is not None and output.open.generated == pack_ids(expected[:11])


def test_queue_full_and_draining_are_terminal_answers() -> None:
    scheduler = Scheduler(make_limits(max_waiting=1), RadixCache(16))
    scheduler.handle(make_request("a", prompt_of(3), 3), 0.0)
    full = scheduler.handle(make_request("b", prompt_of(3), 3), 0.0)
    scheduler.draining = True
    draining = scheduler.handle(make_request("c", prompt_of(3), 3), 0.0)
    codes = [out.tokens[0][1].failure for out in (full, draining)]
    assert [failure.code for failure in codes if failure] == ["queue_full", "server_draining"]
    assert [ended.rid for out in (full, draining) for ended in out.ended] == ["b", "c"]


def test_random_cases_preempt_and_hit_the_cache() -> None:
    """The random cases are worth something only if they reach what they are there for."""
    preempted = hits = discarded = 0
    for seed in range(60):
        done = run_case(random_case(seed), 1, "lazy")
        preempted += done.scheduler.counters.preemptions
        hits += done.scheduler.counters.hit_tokens
        discarded += done.scheduler.counters.discarded_tokens
    assert preempted > 20 and hits > 1000 and discarded > 20
