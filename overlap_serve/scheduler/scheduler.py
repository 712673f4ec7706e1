"""`Scheduler`: what runs next. `handle` a message, `expire` deadlines, `plan` a step, `apply` its result.

It knows neither torch nor sockets nor clocks: `now` is passed in, so equal inputs give equal plans on every machine
(invariant 3). It thinks in `num_computed` catching up with the request's tokens: chunked prefill, prefix hits, mixed
batches, preemption and resumption are cases of that one rule.

Pages and slots return late: only when a request is done *and* no step in flight holds it (ADR-0003). `plan` may be called
with `depth` steps in flight; it assumes that every row in flight advances as planned.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from overlap_serve.cache.prefix import PrefixCache
from overlap_serve.messages import AbortRequest, Ended, Failure, GenerateRequest, unpack_ids
from overlap_serve.sampling import AbortCause, FinishReason, SamplingParams, TokenLogprob
from overlap_serve.scheduler import policy
from overlap_serve.scheduler.limits import INFINITY, Limits
from overlap_serve.scheduler.outputs import Counters, Outputs, Times, next_output, times_of, token_output
from overlap_serve.scheduler.req import Group, Req, ReqState
from overlap_serve.scheduler.room import Room
from overlap_serve.step import Join, StepPlan, StepResult

SCAN_LIMIT = 16  # waiting requests that are tried in one step when those before them do not fit


class _Planned(NamedTuple):
    step: int
    rows: list[tuple[Req, bool]]  # (row, sampled)
    scoring: list[tuple[Req, int]]  # (row that asks for logprobs of its prompt, start of its chunk)


class _Decode(NamedTuple):
    """The decode part of a plan. pressed: pages are short, so nobody is admitted in this step. prefilling: other rows have more to
    do than one token."""

    rows: list[Req]  # in join order
    skipped: list[Req]
    new_pages: list[tuple[int, int]]
    prefill_tokens: int
    pressed: bool
    prefilling: bool


class Scheduler:
    """Owns every request of one engine, its pages and slots. Not thread-safe: the loop's thread calls it."""

    def __init__(self, limits: Limits, cache: PrefixCache, endpoint: str = "") -> None:
        self.limits = limits
        self.counters = Counters()
        self.draining = False
        self.paused = False  # new requests are refused, open ones go on
        self.times: list[Times] = []  # of choices that ended since the reader last cleared it
        self._room = Room(limits, cache)
        self._endpoint = endpoint
        self._groups: dict[str, Group] = {}
        self._waiting: list[Req] = []  # sorted by key
        self._running: dict[Req, None] = {}  # in join order, which is row order
        self._leaving: dict[Req, None] = {}  # ended or preempted, held by a step in flight
        self._leaves: list[int] = []  # slots that the engine must drop with the next plan
        self._inflight: deque[_Planned] = deque()
        self._next_step = 0
        self._next_seq = 0
        self.last_step_tokens = 0
        self._prefill_wait = 0
        self._nearest_deadline = INFINITY

    # -- what others may ask

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._groups)

    @property
    def at_rest(self) -> bool:
        return not (self._groups or self._leaving or self._inflight)

    def waiting_by_reason(self) -> dict[str, int]:
        """queue: next in line; capacity: did not fit; prefix: waits for its first choice's prompt."""
        counts = {"queue": 0, "capacity": 0, "prefix": 0}
        for req in self._waiting:
            counts["prefix" if self._waits_for_sibling(req) else "capacity" if req.blocked else "queue"] += 1
        return counts

    def pages_by_state(self) -> dict[str, int]:
        """free, cached and owned pages; they add up to all there are (invariant 5)."""
        return self._room.by_state((*self._running, *self._leaving))

    def check_accounting(self) -> None:
        """Invariant 5, and at rest: nothing owned, nothing locked, every slot free. Raises AssertionError."""
        self._room.check((*self._running, *self._leaving), self.at_rest)

    def repair(self) -> None:
        """At rest only: forget the prefix cache and count every page and slot as free. For accounting that went wrong."""
        assert self.at_rest, "requests hold pages"
        self._room.reset()
        self.counters.repairs += 1

    def flush(self) -> int:
        """At rest only: forget the prefix cache. Returns the pages that it held."""
        assert self.at_rest, "requests hold pages"
        num_cached = self._room.cache.num_cached
        self._room.reset()
        return num_cached

    @property
    def next_deadline(self) -> float:
        """No request expires before this time (infinity: none has a deadline)."""
        return self._nearest_deadline

    # -- messages

    def handle(self, message: GenerateRequest | AbortRequest, now: float) -> Outputs:
        """Accept, refuse or abort. Every accepted request ends exactly once, also on refusal."""
        out = Outputs()
        if isinstance(message, AbortRequest):
            group = self._groups.get(message.rid)
            if group is not None:
                self._abort(group, message.cause, message.choice, now, out)
            return out
        earlier = self._groups.get(message.rid)
        if earlier is not None:
            self._abort(earlier, "client", None, now, out)
        self._accept(message, now, out)
        return out

    def expire(self, now: float) -> Outputs:
        """End requests whose deadline has passed."""
        out = Outputs()
        if now >= self._nearest_deadline:
            for group in [g for g in self._groups.values() if g.deadline <= now]:
                self._abort(group, "deadline", None, now, out)
            self._nearest_deadline = min((g.deadline for g in self._groups.values()), default=INFINITY)
        return out

    def abort_all(self, cause: AbortCause, now: float) -> Outputs:
        out = Outputs()
        for group in list(self._groups.values()):
            self._abort(group, cause, None, now, out)
        return out

    def fail_all(self, failure: Failure, now: float) -> Outputs:
        """The engine is gone: every open request ends with `failure`."""
        out = Outputs()
        for group in list(self._groups.values()):
            for req in [r for r in group.reqs if r.finish is None]:
                self._end(req, "error", failure.code, now, out, failure=failure)
        return out

    def _accept(self, request: GenerateRequest, now: float, out: Outputs) -> None:
        group = Group(request, self._next_seq, now)
        self._next_seq += 1
        self._groups[request.rid] = group
        self._nearest_deadline = min(self._nearest_deadline, group.deadline)
        prompt = unpack_ids(request.prompt)
        limit = min(len(prompt) + request.sampling.max_tokens, self.limits.max_model_len, self.limits.capacity_tokens)
        group.reqs = [Req(group, choice, prompt, limit) for choice in range(request.n)]
        failure = self._refusal(request, prompt)
        for req in group.reqs:
            if failure is not None:
                self._end(req, "error", failure.code, now, out, failure=failure)
            elif len(req.tokens) >= limit:
                self._end(req, "length", None, now, out)
            else:
                insort(self._waiting, req, key=lambda r: r.key)

    def _refusal(self, request: GenerateRequest, prompt: list[int]) -> Failure | None:
        """Checked at the ingress before; here again, because replicas may differ and nothing may wedge the engine."""
        n, limits = len(prompt), self.limits
        if n == 0:
            return Failure("empty_prompt", "the prompt has no tokens; send at least one", 400)
        if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
            return Failure("invalid_token_id", f"prompt token ids must be in 0..{limits.vocab_size - 1}", 400)
        if n >= limits.max_model_len or n + 1 > limits.capacity_tokens:
            length = min(limits.max_model_len, limits.capacity_tokens)
            text = f"This model's maximum context length is {length} tokens, the prompt has {n}; shorten it"
            return Failure("context_length_exceeded", text, 400)
        if self.draining:
            return Failure("server_draining", "this server is shutting down; retry on another", 503)
        if self.paused and not request.continued:
            return Failure("server_paused", "this server is paused; try again later", 503)
        if self._waiting and len(self._waiting) + request.n > limits.max_waiting:
            return Failure("queue_full", f"{len(self._waiting)} requests wait already; retry later", 429)
        return None

    def _abort(self, group: Group, cause: AbortCause, choice: int | None, now: float, out: Outputs) -> None:
        finish: FinishReason = "stop" if cause == "stop" else "abort"
        for req in group.reqs:
            if req.finish is None and choice in (None, req.choice):
                self._end(req, finish, cause, now, out)

    # -- plan

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None if nothing can run. Rows that have nothing to plan any more leave with the plan after it."""
        decode = self._plan_decode()
        chunks, joins = self._plan_prefill(decode, now)
        scoring = [(req, req.num_computed) for req in chunks if req.scores_prompt]
        rows = [(req, self._advance(req, length)) for req, length in chunks.items()]
        exhausted = [req for req in chunks if req.exhausted]
        for req in decode.rows:
            # `_advance` by one, written out, as all that runs once for each row and step is.
            req.num_computed += 1
            req.num_pending = num_pending = req.num_pending + 1
            req.inflight += 1
            if len(req.tokens) + num_pending >= req.limit:
                exhausted.append(req)
        rows += [(req, True) for req in decode.rows]
        if not rows:
            return None
        plan = StepPlan(
            step=self._next_step,
            leaves=tuple(self._leaves),
            joins=tuple(joins),
            new_pages=tuple(decode.new_pages),
            chunks=tuple((req.slot, length) for req, length in chunks.items()),
            skips=tuple(req.slot for req in decode.skipped),
        )
        self._inflight.append(_Planned(plan.step, rows, scoring))
        self._leaves = []
        self._next_step += 1
        self.last_step_tokens = sum(chunks.values()) + len(decode.rows)
        for req in exhausted:
            self._leave(req)
        return plan

    def _advance(self, req: Req, length: int) -> bool:
        """Count the row's tokens as computed; True if it samples."""
        req.num_computed += length
        samples = req.num_computed == req.num_planned
        req.num_pending += samples
        req.inflight += 1
        return samples

    def _plan_decode(self) -> _Decode:
        """Choose decode rows, give them their pages, and preempt where pages run out (ADR-0003, ADR-0011)."""
        ready, skipped_before, at_page_end = self._look_at_rows()
        prefilling = len(self._running) > len(ready)
        wants_prefill = prefilling or (bool(self._waiting) and self._room.slots.num_free > 0)
        starved = sum(req.num_skipped >= self.limits.max_decode_gap_steps for req in skipped_before)
        split = policy.split_budget(
            self.limits.max_step_tokens,
            len(ready),
            wants_prefill,
            self._prefill_wait >= self.limits.max_prefill_wait_steps,
            starved,
        )
        self._prefill_wait = self._prefill_wait + 1 if wants_prefill and split.prefill_tokens == 0 else 0
        chosen = ready
        if split.decode_rows < len(ready):
            longest_gap = set(sorted(ready, key=lambda req: -req.num_skipped)[: split.decode_rows])
            chosen = [req for req in ready if req in longest_gap]
            at_page_end = [req for req in at_page_end if req in longest_gap]
        new_pages, short = self._grow(at_page_end)
        rows, skipped = chosen, []
        if short or self._headroom(at_page_end) < 0:
            self._relieve(at_page_end, short)
            retried, short = self._grow([req for req in short if req.state is ReqState.RUNNING])
            new_pages += retried
            waiting_for_page = set(short)
            rows = [req for req in chosen if req.state is ReqState.RUNNING and req not in waiting_for_page]
        if len(rows) < len(ready):
            running = set(rows)
            skipped = [req for req in ready if req.state is ReqState.RUNNING and req not in running]
            new_pages = [(req, page) for req, page in new_pages if req in running]
        self._count_skips(rows, skipped, skipped_before)
        granted = [(req.slot, page) for req, page in new_pages]
        return _Decode(rows, skipped, granted, split.prefill_tokens, bool(short), prefilling)

    def _look_at_rows(self) -> tuple[list[Req], list[Req], list[Req]]:
        """Rows with one token to do, in join order; of these, those that sat out the step before, and those that need a page for this
        step or for the next: in most steps few, and only they can make pages short."""
        ready: list[Req] = []
        skipped_before: list[Req] = []
        at_page_end: list[Req] = []
        page_size = self.limits.page_size
        for req in self._running:
            num_computed = req.num_computed
            if len(req.tokens) + req.num_pending - num_computed == 1:
                ready.append(req)
                if req.num_skipped:
                    skipped_before.append(req)
                if num_computed + 1 >= len(req.pages) * page_size:
                    at_page_end.append(req)
        return ready, skipped_before, at_page_end

    def _count_skips(self, rows: list[Req], skipped: list[Req], skipped_before: list[Req]) -> None:
        if skipped_before:
            for req in rows:
                req.num_skipped = 0
        for req in skipped:
            req.num_skipped += 1

    def _needs_page(self, req: Req, ahead: int = 0) -> bool:
        return (req.num_computed + ahead) // self.limits.page_size >= len(req.pages)

    def _grow(self, rows: list[Req]) -> tuple[list[tuple[Req, int]], list[Req]]:
        """Give each row the page of its next position, oldest first; return the new pages and the rows that got none."""
        new_pages: list[tuple[Req, int]] = []
        short: list[Req] = []
        for req in sorted((r for r in rows if self._needs_page(r)), key=lambda r: r.key):
            if self._room.available() > 0:
                [page] = self._room.take_pages(1)
                req.pages.append(page)
                new_pages.append((req, page))
            else:
                short.append(req)
        return new_pages, short

    def _may_end(self, req: Req) -> bool:
        """A step in flight may turn out to be its last one."""
        masked = req.num_planned - req.prompt_len <= req.group.request.sampling.min_tokens
        return req.inflight > 0 and bool(req.end_ids) and not masked

    def _headroom(self, rows: list[Req]) -> int:
        """Pages left for the step after this one, counting those that come back late; below 0: preempt now, one step ahead.
        rows: all that may need one."""
        needed = sum(
            self._needs_page(req, 1) and req.num_planned + 1 < req.limit and not self._may_end(req) for req in rows
        )
        return self._room.available() + self._incoming() - needed

    def _relieve(self, rows: list[Req], short: list[Req]) -> None:
        """Preempt the newest rows until what is short is covered. Never the oldest, and never in favour of a row that may
        turn out to be finished: that one sits out a step, and then it is certain."""
        missing = sum(not self._may_end(req) for req in short) - self._headroom(rows)
        victims = sorted(self._running, key=lambda req: req.key)[1:]
        while missing > 0 and victims:
            victim = victims.pop()
            missing -= len(victim.pages) - victim.num_shared + (victim in short)
            self.counters.preemptions += 1
            victim.num_preempted += 1
            self._leave(victim)
            if victim.inflight == 0:
                self._release(victim)

    def _plan_prefill(self, decode: _Decode, now: float) -> tuple[dict[Req, int], list[Join]]:
        """Chunks of rows in prefill, oldest first, then admissions, within the budget that decode left."""
        budget = decode.prefill_tokens
        chunks: dict[Req, int] = {}
        joins: list[Join] = []
        rows: list[Req] = []
        if decode.prefilling:
            rows = sorted((req for req in self._running if req.todo > 1), key=lambda req: req.key)
        for i, req in enumerate(rows):
            if budget > 0:
                others_wait = i == 0 and (len(rows) > 1 or bool(self._waiting))
                chunks[req] = policy.oldest_chunk(req.todo, budget, others_wait)
                budget -= chunks[req]
        while budget > 0 and not decode.pressed and (admitted := self._admit(now)) is not None:
            joins.append(self._join(admitted))
            others_wait = not chunks and bool(self._waiting)
            chunks[admitted] = policy.oldest_chunk(admitted.todo, budget, others_wait)
            budget -= chunks[admitted]
        for req in chunks:  # what nobody else wanted goes to the oldest
            extra = min(budget, req.todo - chunks[req])
            chunks[req] += extra
            budget -= extra
        return chunks, joins

    # -- admission

    def _admit(self, now: float) -> Req | None:
        """Take the first waiting request that fits, with its pages and slot. Small ones may pass a big one, a bounded number
        of times; then everything that comes free is kept for it."""
        if self._room.slots.num_free == 0:
            return None
        blocked: list[Req] = []
        for req in self._waiting:
            if self._waits_for_sibling(req):
                continue
            if self._take_room(req):
                for passed in blocked:
                    passed.bypassed += 1
                self._waiting.remove(req)
                self._start(req, now)
                return req
            req.blocked = True
            blocked.append(req)
            if req.bypassed >= self.limits.max_bypass or len(blocked) >= SCAN_LIMIT:
                return None
        return None

    def _waits_for_sibling(self, req: Req) -> bool:
        """Choices of one prompt wait until the first has put the prompt into the prefix cache, so that it is computed once."""
        first = req.group.reqs[0]
        return (
            self._room.cache.shares
            and req is not first
            and first.finish is None
            and first.first_token is None
            and req.prompt_len > self.limits.page_size
        )

    def _take_room(self, req: Req) -> bool:
        """Pages for all known tokens, if that leaves room for rows that run to grow a little (no worst case)."""
        margin = 0
        if self._running or self._leaving:
            page_size, growth = self.limits.page_size, self.limits.growth_tokens
            margin = policy.growth_pages(len(self._running), growth, page_size)
            margin += policy.own_margin_pages(req.limit - len(req.tokens), req.num_preempted, growth, page_size)
        return self._room.reserve(req, margin)

    def _start(self, req: Req, now: float) -> None:
        [req.slot] = self._room.slots.take(1)
        req.state = ReqState.RUNNING
        req.bypassed, req.blocked = 0, False
        self._running[req] = None
        counts = not req.group.request.probe
        if counts:
            self.counters.queried_tokens += req.reusable_tokens if req.scores_prompt else len(req.tokens)
            self.counters.hit_tokens += req.num_computed
        if req.first_scheduled is None:
            req.first_scheduled = now
            req.cached_tokens = min(req.num_computed, req.prompt_len)
            if req.choice == 0 and counts:  # the choices share one prompt
                self.counters.prompt_tokens += req.prompt_len
                self.counters.cached_tokens += req.cached_tokens

    def _join(self, req: Req) -> Join:
        return Join(
            slot=req.slot,
            token_ids=req.tokens.tobytes(),
            prompt_len=req.prompt_len,
            start=req.num_computed,
            pages=tuple(req.pages),
            sampling=self._row_sampling(req),
            choice=req.choice,
        )

    def _row_sampling(self, req: Req) -> SamplingParams:
        """What this row asks of the engine: prompt logprobs only of the choice that reports them, and only until they are there."""
        sampling = req.group.request.sampling
        if sampling.prompt_logprobs < 0 or req.scores_prompt:
            return sampling
        return msgspec.structs.replace(sampling, prompt_logprobs=-1)

    # -- result

    def apply(self, result: StepResult, now: float) -> Outputs:
        """Process the oldest step in flight: append tokens, decide who is finished, release what no step holds any more."""
        planned = self._inflight.popleft()
        assert planned.step == result.step, f"result of step {result.step}, expected {planned.step}"
        out = Outputs()
        if planned.scoring:
            self._keep_prompt_logprobs(planned, result)
        ids, logprobs = iter(result.token_ids), _of_rows(result.logprobs)
        num_generated = num_discarded = 0
        leaving = ReqState.LEAVING
        for req, samples in planned.rows:
            req.inflight = inflight = req.inflight - 1
            if samples:
                req.num_pending -= 1
                token, entries = next(ids), next(logprobs)
                if req.finish is None:
                    num_generated += req.counts
                    self._append(req, token, entries, now, out)
                else:
                    num_discarded += 1
            if inflight == 0 and req.state is leaving:
                self._release(req)
        self.counters.generated_tokens += num_generated
        self.counters.discarded_tokens += num_discarded
        return out

    def _keep_prompt_logprobs(self, planned: _Planned, result: StepResult) -> None:
        """Append what the chunks say of tokens after their start; what a resumed request computed before is known already."""
        by_slot = dict(result.prompt_logprobs)
        for req, start in planned.scoring:
            if req.prompt_logprobs is not None:  # else it has ended meanwhile
                num_known = len(req.prompt_logprobs) - (start + 1)
                assert num_known >= 0, "logprobs of prompt tokens were lost"
                req.prompt_logprobs += by_slot.get(req.slot, ())[num_known:]

    def _append(self, req: Req, token: int, logprobs: tuple[TokenLogprob, ...], now: float, out: Outputs) -> None:
        tokens = req.tokens
        tokens.append(token)
        if req.opened and token not in req.end_ids and len(tokens) < req.limit:
            out.tokens.append((req.detokenizer, next_output(req, token, logprobs)))
            return
        if req.first_token is None:
            assert not req.scores_prompt, "logprobs of prompt tokens were lost"
            req.first_token = now
            self._room.share_prompt(req)
        if token in req.end_ids:
            is_stop_id = token in req.group.request.sampling.stop_token_ids
            self._end(req, "stop", token if is_stop_id else None, now, out, (token,), logprobs)
        elif len(req.tokens) >= req.limit:
            self._end(req, "length", None, now, out, (token,), logprobs)
        else:
            self._emit(req, (token,), logprobs, out)

    # -- ends

    def _end(
        self,
        req: Req,
        finish: FinishReason,
        stop_reason: int | str | None,
        now: float,
        out: Outputs,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        failure: Failure | None = None,
    ) -> None:
        """The one place where a choice ends: its terminal output, its group, and what it holds."""
        assert req.finish is None, "a choice ends once"
        req.finish, req.stop_reason, req.failure = finish, stop_reason, failure
        self._emit(req, token_ids, logprobs, out)
        if not req.group.request.probe:
            self.times.append(times_of(req, now))
        if req.state is ReqState.WAITING:
            if req in self._waiting:
                self._waiting.remove(req)
            req.state = ReqState.GONE
        elif req.state is ReqState.RUNNING:
            self._leave(req)
            if req.inflight == 0:
                self._release(req)
        group = req.group
        group.num_open -= 1
        if group.num_open == 0:
            del self._groups[group.request.rid]
            out.ended.append(Ended(group.request.rid, group.request.attempt))

    def _emit(self, req: Req, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...], out: Outputs) -> None:
        out.tokens.append((req.detokenizer, token_output(req, self._endpoint, token_ids, logprobs)))

    def _leave(self, req: Req) -> None:
        """Out of the batch: the engine drops the slot with the next plan. Pages and slot stay until nothing in flight holds them."""
        del self._running[req]
        self._leaves.append(req.slot)
        self._leaving[req] = None
        req.state = ReqState.LEAVING

    def _release(self, req: Req) -> None:
        """Late release: return pages and slot; a preempted request waits again, in its old place."""
        self._room.release(req)
        del self._leaving[req]
        if req.finish is None:
            req.state = ReqState.WAITING
            insort(self._waiting, req, key=lambda r: r.key)
        else:
            req.state = ReqState.GONE

    def _incoming(self) -> int:
        """Pages that will come back when the steps in flight are processed."""
        return sum(len(req.pages) - req.num_shared for req in self._leaving)


def _of_rows(logprobs: tuple[TokenLogprob | None, ...]) -> Iterator[tuple[TokenLogprob, ...]]:
    """What each sampled row reports beside its token. Rows of a step in which nobody asks cost next to nothing."""
    if not logprobs:
        return itertools.repeat(())
    return iter([() if entry is None else (entry,) for entry in logprobs])
