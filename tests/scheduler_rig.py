"""Rig S: the real scheduler, loop, cache and batch mirror over the fake engine, with everything checked at every round.

The fake engine's next token is a pure function of what its KV pages hold, and so are its logprobs, so that a page mix-up is a wrong
token or a wrong value. The rig adds
what tokens alone cannot show: who touches shared device state, pages that return under a step in flight, page table entries
that change, rows that differ between scheduler and mirror, streams without exactly one end.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from overlap_serve.cache.prefix import NoPrefixCache
from overlap_serve.cache.radix import RadixCache
from overlap_serve.device.base import StreamFactory
from overlap_serve.device.stepped import SteppedStreams
from overlap_serve.device.thread import ThreadStreams
from overlap_serve.engine.fake import DeviceState, FakeEngine, context_hash, next_token, token_logprob
from overlap_serve.messages import (
    AbortRequest,
    Ended,
    GenerateRequest,
    Message,
    Route,
    Stop,
    TokenOutput,
    pack_ids,
    unpack_ids,
)
from overlap_serve.runtime.loop import OverlapLoop
from overlap_serve.runtime.meter import LoopMeter
from overlap_serve.sampling import SamplingParams, TextParams, TokenLogprob
from overlap_serve.scheduler.limits import Limits
from overlap_serve.scheduler.scheduler import Scheduler
from overlap_serve.step import StepPlan

VOCAB = 258
STREAMS = ("threaded", "lazy", "eager", "random")


def make_limits(**changes: int) -> Limits:
    values = {
        "num_pages": 64,
        "page_size": 16,
        "num_slots": 8,
        "max_model_len": 512,
        "vocab_size": VOCAB,
        "max_step_tokens": 64,
        "max_waiting": 10_000,
        "max_decode_gap_steps": 1,
        "max_prefill_wait_steps": 8,
        "max_bypass": 4,
    }
    return Limits(**{**values, **changes})


def make_request(rid: str, prompt: Sequence[int], max_tokens: int, **fields: object) -> GenerateRequest:
    """`sampling` fields by name; n, priority, timeout_s, cache_salt and generated belong to the request."""
    own = {k: fields.pop(k) for k in ("n", "priority", "timeout_s", "cache_salt", "generated") if k in fields}
    values: dict[str, object] = {"temperature": 0.0, **fields}
    n = own.pop("n", 1)
    assert isinstance(n, int)
    return GenerateRequest(
        rid=rid,
        attempt=0,
        prompt=pack_ids(list(prompt)),
        n=n,
        sampling=SamplingParams(max_tokens=max_tokens, **values),  # type: ignore[arg-type]
        text=TextParams(),
        route=Route("detokenizer", "ingress"),
        **own,  # type: ignore[arg-type]
    )


def make_streams(kind: str, seed: int = 0) -> StreamFactory:
    if kind == "threaded":
        return ThreadStreams()
    if kind == "random":
        return SteppedStreams(rng=random.Random(seed))
    return SteppedStreams(eager=frozenset({"scheduler"}) if kind == "eager" else frozenset())


def oracle(request: GenerateRequest, choice: int, limits: Limits, eos_every: int) -> tuple[list[int], str]:
    """Generated ids and finish reason of a request that runs alone, undisturbed, with no cache, pages or chunks."""
    prompt = unpack_ids(request.prompt)
    sampling = request.sampling
    bound = min(len(prompt) + sampling.max_tokens, limits.max_model_len, limits.capacity_tokens)
    tokens = np.zeros(bound + 1, dtype=np.int64)
    tokens[: len(prompt)] = prompt
    ends = sampling.end_token_ids()
    for n in range(len(prompt), bound):
        tokens[n] = next_token(tokens[:n], len(prompt), sampling, choice, eos_every)
        if int(tokens[n]) in ends:
            return tokens[len(prompt) : n + 1].tolist(), "stop"
    return tokens[len(prompt) : bound].tolist(), "length"


def oracle_logprobs(request: GenerateRequest, tokens: Sequence[int], eos_every: int) -> list[TokenLogprob]:
    """Logprobs of the prompt (if asked for) and of these generated tokens, one context at a time."""
    prompt = unpack_ids(request.prompt)
    known = np.array([*prompt, *tokens], dtype=np.int64)
    asks = [request.sampling.prompt_logprobs] * len(prompt) + [request.sampling.logprobs] * len(tokens)
    entries = [TokenLogprob(prompt[0], None)] if asks[0] >= 0 else []
    for n, num_top in itertools.islice(enumerate(asks), 1, None):
        if num_top >= 0:
            entries.append(token_logprob(context_hash(known[:n]), int(known[n]), num_top, eos_every))
    return entries


class CheckedEngine(FakeEngine):
    """The fake engine, watching who touches device state (invariant 2) and that page table entries stay (pains A17)."""

    def __init__(self, streams: StreamFactory, limits: Limits, eos_every: int) -> None:
        self._streams = streams
        self._entries: dict[tuple[int, int], int] = {}
        self.rows_log: list[tuple[list[int], list[int], list[int]]] = []
        super().__init__(
            streams,
            num_slots=limits.num_slots,
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            max_model_len=limits.max_model_len,
            eos_every=eos_every,
        )

    @property
    def state(self) -> DeviceState:
        where = (
            self._streams.running if isinstance(self._streams, SteppedStreams) else threading.current_thread().name
        ).removeprefix("stream-")
        assert where == "engine", f"device state touched from {where!r}"
        return self._state

    @state.setter
    def state(self, state: DeviceState) -> None:
        self._state = state

    def launch_forward(self, plan: StepPlan) -> None:
        for join in plan.joins:
            self._entries = {key: page for key, page in self._entries.items() if key[0] != join.slot}
        super().launch_forward(plan)
        assert self._launched is not None
        rows = self._launched.rows
        self.rows_log.append((rows.slots_B.tolist(), rows.starts_B.tolist(), rows.lengths_B.tolist()))

    def write_pages(self, entries: Sequence[tuple[int, int, int]]) -> None:
        for slot, index, page in entries:
            assert self._entries.setdefault((slot, index), page) == page, (
                "a page table entry changed while its row runs"
            )
        super().write_pages(entries)


class ScriptedInbox:
    """Delivers messages at given rounds; checks the rig at every round; stops the loop when the script is over."""

    def __init__(self, script: list[tuple[int, Message]], check: Callable[[], None], round_limit: int) -> None:
        self._script = sorted(script, key=lambda item: item[0])
        self._check = check
        self._round_limit = round_limit
        self.round = 0
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def drain(self, timeout_s: float | None = 0.0) -> list[Message]:
        self._check()
        self.round += 1
        self.now += 0.001
        assert self.round <= self._round_limit, f"not finished after {self._round_limit} rounds"
        if timeout_s != 0.0 and self._script and self._script[0][0] > self.round:
            self.round = self._script[0][0]  # nothing can run: go on to the next arrival
        due = [message for at, message in self._script if at <= self.round]
        self._script = [item for item in self._script if item[0] > self.round]
        if not due and not self._script and timeout_s != 0.0:
            return [Stop(drain_s=1e9)]
        return due


class Ledger:
    """An outbox that checks streams as they come: contiguous ids, one open, exactly one end, nothing after it."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.logprobs: dict[tuple[str, int], list[TokenLogprob]] = {}
        self.prompt_logprobs: dict[tuple[str, int], tuple[TokenLogprob, ...]] = {}
        self.finish: dict[tuple[str, int], TokenOutput] = {}
        self.ended: list[str] = []
        self.first_round: dict[tuple[str, int], int] = {}
        self.rounds: dict[tuple[str, int], list[int]] = {}
        self.clock: Callable[[], int] = lambda: 0

    def send(self, endpoint: str, messages: list[Message]) -> bool:
        for message in messages:
            if isinstance(message, Ended):
                assert message.rid not in self.ended, f"{message.rid} ended twice"
                self.ended.append(message.rid)
            else:
                assert isinstance(message, TokenOutput) and endpoint == "detokenizer"
                self._take(message)
        return True

    def _take(self, output: TokenOutput) -> None:
        key = (output.rid, output.choice)
        assert key not in self.finish, f"{key}: output after the end"
        assert (output.open is not None) == (key not in self.tokens), f"{key}: opened twice or never"
        ids = self.tokens.setdefault(key, [])
        assert output.first_index == len(ids), f"{key}: ids repeated or lost"
        ids.extend(output.token_ids)
        assert len(output.logprobs) in (0, len(output.token_ids)), f"{key}: logprobs repeated or lost"
        self.logprobs.setdefault(key, []).extend(output.logprobs)
        if output.prompt_logprobs is not None:
            assert output.open is not None and output.choice == 0, f"{key}: prompt logprobs at the wrong place"
            self.prompt_logprobs[key] = output.prompt_logprobs
        if output.token_ids:
            self.rounds.setdefault(key, []).append(self.clock())
        if output.finish is not None:
            self.finish[key] = output


@dataclass
class Case:
    """One scripted run."""

    limits: Limits
    script: list[tuple[int, Message]]
    cache: str = "radix"
    eos_every: int = 0
    seed: int = 0
    round_limit: int = 20_000
    requests: list[GenerateRequest] = field(init=False)
    aborts: list[AbortRequest] = field(init=False)

    def __post_init__(self) -> None:
        self.requests = [m for _, m in self.script if isinstance(m, GenerateRequest)]
        self.aborts = [m for _, m in self.script if isinstance(m, AbortRequest)]


@dataclass
class Run:
    """What a run left behind, for further assertions."""

    ledger: Ledger
    scheduler: Scheduler
    engine: CheckedEngine
    rounds: int


def run_case(
    case: Case,
    depth: int,
    streams: str,
    *,
    scheduler_class: type[Scheduler] = Scheduler,
    engine_class: type[CheckedEngine] = CheckedEngine,
    ledger_class: type[Ledger] = Ledger,
) -> Run:
    """Run to the end and check every invariant on the way. AssertionError says what broke."""
    limits = case.limits
    radix = RadixCache(limits.page_size) if case.cache == "radix" else None
    scheduler = scheduler_class(limits, radix if radix is not None else NoPrefixCache())
    engine = engine_class(make_streams(streams, case.seed), limits, case.eos_every)
    checker = _Checker(scheduler, engine, radix)
    inbox = ScriptedInbox(case.script, checker.check, case.round_limit)
    ledger = ledger_class()
    ledger.clock = lambda: inbox.round
    loop = OverlapLoop(
        scheduler, engine, inbox, ledger, LoopMeter(clock=inbox.clock), depth=depth, control="detokenizer"
    )
    try:
        loop.run()
    except AssertionError as error:
        # The loop ends every request before it raises, which may trip over what broke: tell of the first.
        raise (error.__context__ if isinstance(error.__context__, AssertionError) else error) from None
    finally:
        engine.close()
    checker.check()
    scheduler.check_accounting()
    assert scheduler.at_rest and scheduler.counters.repairs == 0
    _check_ends(case, ledger)
    return Run(ledger, scheduler, engine, inbox.round)


class _Checker:
    """Invariants 1, 2 and 5 and the mirror, between any two rounds."""

    def __init__(self, scheduler: Scheduler, engine: CheckedEngine, radix: RadixCache | None) -> None:
        self._scheduler = scheduler
        self._engine = engine
        self._radix = radix
        self._held: dict[int, list[int]] = {}  # step in flight -> pages its rows use
        self._seen = 0

    def check(self) -> None:
        scheduler = self._scheduler
        scheduler.check_accounting()
        if self._radix is not None:
            self._radix.check()
        self._check_late_release()  # first: a row that was released early has lost its slot
        self._check_rows()

    def _check_rows(self) -> None:
        """The rows that the mirror rebuilt from deltas are the rows that the scheduler planned."""
        if len(self._engine.rows_log) == self._seen or not self._scheduler._inflight:
            return
        self._seen = len(self._engine.rows_log)
        planned = self._scheduler._inflight[-1]
        if planned.step == self._seen - 1:
            slots = [req.slot for req, _ in planned.rows]
            assert self._engine.rows_log[-1][0] == slots, "rows of plan and mirror differ"
            self._held[planned.step] = [page for req, _ in planned.rows for page in req.pages]

    def _check_late_release(self) -> None:
        inflight = {planned.step for planned in self._scheduler._inflight}
        self._held = {step: pages for step, pages in self._held.items() if step in inflight}
        pool = self._scheduler._room.pages
        for pages in self._held.values():
            assert not any(pool._is_free[page] for page in pages), "a page returned under a step in flight"
        slots = self._scheduler._room.slots
        for planned in self._scheduler._inflight:
            for req, _ in planned.rows:
                assert req.slot >= 0 and not slots._is_free[req.slot], "a slot returned under a step in flight"


def _check_ends(case: Case, ledger: Ledger) -> None:
    """Every accepted request ended exactly once (invariant 4), with the oracle's tokens (invariant 6) or a prefix of them."""
    assert sorted(ledger.ended) == sorted(r.rid for r in case.requests), "requests without an end"
    disturbed = {(a.rid, a.choice) for a in case.aborts}
    for request in case.requests:
        for choice in range(request.n):
            key = (request.rid, choice)
            assert key in ledger.finish, f"{key}: no terminal output"
            end = ledger.finish[key]
            expected, reason = oracle(request, choice, case.limits, case.eos_every)
            got = ledger.tokens[key]
            assert got == expected[: len(got)], f"{key}: wrong tokens"
            may_be_cut = (request.rid, None) in disturbed or key in disturbed or request.timeout_s is not None
            if not may_be_cut or end.finish in ("length",):
                assert (got, end.finish) == (expected, reason), (
                    f"{key}: {end.finish} after {len(got)} of {len(expected)}"
                )
            _check_logprobs(request, key, ledger, case.eos_every)


def _check_logprobs(request: GenerateRequest, key: tuple[str, int], ledger: Ledger, eos_every: int) -> None:
    """Exactly those that were asked for: of each token, and of the prompt once, on choice 0, before its first token."""
    got = [*ledger.prompt_logprobs.get(key, ()), *ledger.logprobs[key]]
    sampling = request.sampling
    if max(sampling.logprobs, sampling.prompt_logprobs) < 0:
        assert got == [], f"{key}: logprobs that nobody asked for"
        return
    if key[1] != 0 or (key not in ledger.prompt_logprobs and not ledger.tokens[key]):
        request = msgspec.structs.replace(request, sampling=msgspec.structs.replace(sampling, prompt_logprobs=-1))
    assert got == oracle_logprobs(request, ledger.tokens[key], eos_every), f"{key}: wrong logprobs"


def random_case(seed: int) -> Case:
    """Random arrivals, lengths, shared prefixes, chunk and page sizes, aborts, priorities, deadlines, logprobs; a tight pool."""
    rng = random.Random(seed)
    asks = random.Random(~seed)
    page_size = rng.choice((1, 1, 4, 16, 16))
    bases = [[rng.randrange(VOCAB) for _ in range(60)] for _ in range(3)]
    script: list[tuple[int, Message]] = []
    longest = 2
    at = 0
    for i in range(rng.randint(1, 10)):
        base = rng.choice(bases)
        prompt = base[: rng.randint(0, 50)] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
        max_tokens = rng.randint(1, 30)
        longest = max(longest, len(prompt) + max_tokens)
        request = make_request(
            f"r{i}",
            prompt,
            max_tokens,
            n=rng.choice((1, 1, 1, 2, 3)),
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.randrange(-(2**63), 2**63),
            ignore_eos=rng.random() < 0.2,
            eos_token_ids=(257,),
            stop_token_ids=(rng.randrange(32, 127),) if rng.random() < 0.2 else (),
            min_tokens=rng.randint(0, max_tokens) if rng.random() < 0.3 else 0,
            priority=rng.choice((0, 0, 0, -1, 1)),
            timeout_s=rng.choice((0.002, 0.01, 0.03)) if rng.random() < 0.1 else None,
            cache_salt=rng.choice(("", "", "a")),
            logprobs=asks.choice((0, 1, 5)) if asks.random() < 0.2 else -1,
            prompt_logprobs=asks.choice((0, 1, 5)) if asks.random() < 0.2 else -1,
        )
        script.append((at, request))
        if rng.random() < 0.25:
            choice = rng.choice((None, 0))
            cause = rng.choice(("client", "stop"))
            script.append((at + rng.randint(0, 40), AbortRequest(f"r{i}", cause, choice)))  # type: ignore[arg-type]
        at += rng.choice((0, 0, 1, 3, 10))
    num_pages = -(-longest // page_size) + rng.choice((0, 1, 3, 40))
    limits = make_limits(
        page_size=page_size,
        num_pages=max(2, num_pages),
        num_slots=rng.randint(1, 6),
        max_model_len=128,
        max_step_tokens=rng.choice((1, 2, 5, 16, 64)),
        max_bypass=rng.randint(0, 4),
        growth_tokens=rng.choice((0, 0, 1, 8, 32)),
        max_decode_gap_steps=rng.randint(1, 3),
        max_prefill_wait_steps=rng.randint(1, 8),
    )
    return Case(limits, script, rng.choice(("radix", "radix", "none")), rng.choice((0, 6, 20)), seed)
