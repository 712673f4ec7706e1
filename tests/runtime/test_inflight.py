"""`InFlight` against a scripted backend: every way in which a request can end, each exactly once. Real zmq, no scheduler."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from overlap_serve.errors import RequestError, ServerUnavailable
from overlap_serve.messages import AbortRequest, Expect, Failure, GenerateRequest, Message, Route, TextDelta
from overlap_serve.metrics import IngressMetrics, TransportMetrics
from overlap_serve.runtime import inflight
from overlap_serve.runtime.inflight import InFlight
from overlap_serve.runtime.streams import Answer
from overlap_serve.sampling import SamplingParams, TextParams
from overlap_serve.transport import Inbox, Outbox

KEY = b"k"
_names = itertools.count()


class Backend:
    """Scheduler and detokenizer as mailboxes; the test says what they send. `submit` is one future per request."""

    def __init__(self) -> None:
        number = next(_names)
        self.scheduler = Inbox(f"inproc://test-scheduler-{number}", KEY)
        self.detokenizer = Inbox(f"inproc://test-detokenizer-{number}", KEY)
        self.calls: dict[str, asyncio.Future[None]] = {}
        self.contexts: list[contextvars.Context] = []
        self.registry = CollectorRegistry()
        metrics = IngressMetrics(self.registry, "m", "i")
        hops = TransportMetrics(self.registry, "i")
        self.inflight = InFlight(f"inproc://test-ingress-{number}", KEY, self._submit, metrics, hops, 60.0)
        self._outbox = Outbox(KEY, "test")

    async def _submit(self, request: GenerateRequest) -> None:
        self.contexts.append(contextvars.copy_context())
        self.calls[request.rid] = asyncio.get_running_loop().create_future()
        await self.calls[request.rid]

    def request(self, rid: str, n: int = 1) -> GenerateRequest:
        return GenerateRequest(
            rid=rid,
            attempt=0,
            prompt=b"",
            n=n,
            sampling=SamplingParams(max_tokens=9),
            text=TextParams(),
            route=Route(self.detokenizer.endpoint, self.inflight.endpoint),
        )

    async def accept(self, *rids: str, n: int = 1, label: str = "", timeout_s: float | None = None) -> Answer:
        answer = Answer(label, [3] * len(rids), n, asyncio.get_running_loop().time())
        self.inflight.accept(answer, [self.request(rid, n) for rid in rids], timeout_s)
        await settle(lambda: all(rid in self.calls for rid in rids))
        return answer

    async def send(self, rid: str, text: str, index: int = 0, choice: int = 0, **fields: Any) -> None:
        """One delta, one token a character; waits until it is processed."""
        opening = {"scheduler": self.scheduler.endpoint} if index == 0 else {}
        ids = tuple(map(ord, text))
        handled = asyncio.get_running_loop().time()
        delta = TextDelta(rid, 0, choice, index, ids, text, index + len(ids), **{**opening, **fields})
        self._outbox.send(self.inflight.endpoint, [delta])
        await settle(lambda: asyncio.get_running_loop().time() > handled + 0.02)

    async def sent_to(self, inbox: Inbox) -> Message:
        got: list[Message] = []

        def received() -> bool:
            got.extend(m for m in inbox.drain() if not isinstance(m, Expect))
            return bool(got)

        await settle(received)
        [message] = got
        return message

    def count(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(f"overlap_{name}", {"model": "m", "replica": "i", **labels})
        return value or 0.0


async def settle(condition: Callable[[], bool]) -> None:
    async def poll() -> None:
        while not condition():
            await asyncio.sleep(0.002)

    await asyncio.wait_for(poll(), 5.0)


def rests(inflight: InFlight) -> bool:
    try:
        inflight.check_at_rest()
    except AssertionError:
        return False
    return True


def scripted(test: Callable[[Backend], Awaitable[None]]) -> None:
    """Run the test on a fresh backend; afterwards nothing is left and every request has ended once."""

    async def run() -> None:
        backend = Backend()
        backend.inflight.start()
        try:
            await test(backend)
            for call in backend.calls.values():
                if not call.done():
                    call.set_result(None)
            await settle(lambda: rests(backend.inflight))
            ends = sum(
                sample.value
                for family in backend.registry.collect()
                for sample in family.samples
                if sample.name in {f"overlap_requests_{kind}_total" for kind in ("finished", "aborted", "failed")}
            )
            assert backend.count("requests_accepted_total") == ends
            assert backend.count("open_requests") == 0
        finally:
            await backend.inflight.close()
            for part in (backend.scheduler, backend.detokenizer, backend._outbox):
                part.close()

    asyncio.run(run())


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflight, "GRACE_S", 0.05)


async def error_of(answer: Answer) -> RequestError:
    with pytest.raises(RequestError) as caught:
        async for _ in answer.batches():
            pass
    return caught.value


def test_request_finishes_with_its_last_terminal_delta_read_or_not() -> None:
    async def test(backend: Backend) -> None:
        answer = await backend.accept("r", n=2)
        await backend.send("r", "ab", finish="length")
        assert len(backend.inflight) == 1
        await backend.send("r", "c", choice=1, finish="stop")
        assert len(backend.inflight) == 0 and answer.complete
        assert backend.count("requests_finished_total", reason="length") == 1
        assert backend.count("request_generation_tokens_sum", finished_reason="length") == 3
        backend.inflight.leave(answer)  # after the end nothing changes
        assert backend.count("requests_aborted_total", cause="client") == 0

    scripted(test)


def test_stop_string_ends_its_choice_in_the_scheduler() -> None:
    async def test(backend: Backend) -> None:
        await backend.accept("r", n=2)
        await backend.send("r", "ab", choice=1, finish="stop", stop_reason="b")
        assert await backend.sent_to(backend.scheduler) == AbortRequest("r", "stop", 1)
        await backend.send("r", "x", finish="stop", stop_reason=7)
        assert backend.scheduler.drain() == []
        assert backend.count("requests_finished_total", reason="stop") == 1

    scripted(test)


def test_reader_that_leaves_before_any_output_cancels_the_call() -> None:
    async def test(backend: Backend) -> None:
        answer = await backend.accept("r", "s")
        backend.inflight.leave(answer)
        await settle(lambda: all(call.cancelled() for call in backend.calls.values()))
        assert backend.count("requests_aborted_total", cause="client") == 1

    scripted(test)


def test_reader_that_leaves_after_output_aborts_in_the_scheduler_and_late_deltas_are_dropped() -> None:
    async def test(backend: Backend) -> None:
        answer = await backend.accept("r")
        await backend.send("r", "ab")
        backend.inflight.leave(answer)
        assert await backend.sent_to(backend.scheduler) == AbortRequest("r", "client")
        assert not backend.calls["r"].cancelled(), "the call returns by itself when the scheduler says so"
        await backend.send("r", "c", 2)
        await backend.send("r", "", 3, finish="abort", stop_reason="client")
        assert backend.count("late_deltas_total") == 2
        assert len(backend.inflight) == 0

    scripted(test)


def test_repeated_delta_is_dropped_and_a_lost_one_fails_the_request() -> None:
    async def test(backend: Backend) -> None:
        answer = await backend.accept("r")
        await backend.send("r", "ab")
        await backend.send("r", "ab")
        assert answer.num_tokens == 2 and backend.count("late_deltas_total") == 1
        await backend.send("r", "d", 3)
        error = await error_of(answer)
        assert (error.http_status, error.code) == (503, "engine_failed")
        assert await backend.sent_to(backend.scheduler) == AbortRequest("r", "shutdown")
        assert backend.count("requests_failed_total", code="engine_failed") == 1

    scripted(test)


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("error", [RuntimeError("actor died"), ServerUnavailable("gone"), asyncio.CancelledError()])
def test_call_that_fails_ends_the_request_and_frees_the_detokenizer(error: BaseException, started: bool) -> None:
    async def test(backend: Backend) -> None:
        answer = await backend.accept("r")
        if started:
            await backend.send("r", "ab")
        if isinstance(error, asyncio.CancelledError):
            backend.calls["r"].cancel()
        else:
            backend.calls["r"].set_exception(error)
        failed = await error_of(answer)
        assert (failed.http_status, failed.code) == (503, "engine_failed")
        assert await backend.sent_to(backend.detokenizer) == AbortRequest("r", "shutdown")
        assert backend.count("requests_failed_total", code="engine_failed") == 1

    scripted(test)


def test_call_that_returns_without_a_terminal_delta_fails_after_a_grace(short_grace: None) -> None:
    async def test(backend: Backend) -> None:
        answer = await backend.accept("r")
        await backend.send("r", "ab")
        backend.calls["r"].set_result(None)
        assert (await error_of(answer)).code == "engine_failed"
        assert await backend.sent_to(backend.detokenizer) == AbortRequest("r", "shutdown")

    scripted(test)


def test_terminal_delta_may_come_after_the_call_has_returned(short_grace: None) -> None:
    async def test(backend: Backend) -> None:
        answer = await backend.accept("r")
        backend.calls["r"].set_result(None)
        await backend.send("r", "ab", finish="length")
        assert answer.complete
        await asyncio.sleep(0.1)
        assert backend.count("requests_finished_total", reason="length") == 1

    scripted(test)


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (Failure("queue_full", "full", 429), 429, "queue_full"),
        (Failure("context_length_exceeded", "long", 400), 400, "context_length_exceeded"),
        (Failure("engine_failed", "dead", 503), 503, "engine_failed"),
        (Failure("internal_error", "bug", 500), 500, "internal_error"),
        (Failure("odd", "odd", 418), 500, "odd"),
        (None, 500, "internal_error"),
    ],
)
def test_reported_failure_becomes_the_error_of_its_status(failure: Failure | None, status: int, code: str) -> None:
    async def test(backend: Backend) -> None:
        answer = await backend.accept("r")
        await backend.send("r", "", finish="error", failure=failure)
        error = await error_of(answer)
        assert (error.http_status, error.code) == (status, code)
        assert (error.should_retry is False) == (status == 500)
        assert backend.count("requests_failed_total", code=code) == 1

    scripted(test)


@pytest.mark.parametrize(
    ("cause", "status", "code"),
    [("deadline", 408, "deadline_exceeded"), ("api", 409, "request_aborted"), ("shutdown", 503, "server_draining")],
)
def test_abort_before_output_is_an_error_and_counts_as_aborted(cause: str, status: int, code: str) -> None:
    async def test(backend: Backend) -> None:
        answer = await backend.accept("r")
        await backend.send("r", "", finish="abort", stop_reason=cause)
        error = await error_of(answer)
        assert (error.http_status, error.code) == (status, code)
        assert backend.count("requests_aborted_total", cause=cause) == 1

    scripted(test)


def test_abort_by_label_reaches_every_prompt_started_or_not() -> None:
    async def test(backend: Backend) -> None:
        answer = await backend.accept("r", "s", label="mine")
        other = await backend.accept("t", label="other")
        await backend.send("r", "ab")
        assert backend.inflight.abort("mine") == 1
        assert await backend.sent_to(backend.scheduler) == AbortRequest("r", "api")
        await settle(lambda: backend.calls["s"].cancelled())
        await backend.send("r", "", 2, finish="abort", stop_reason="api")
        assert [choice.finish for choice in answer.choices] == ["abort", "abort"]
        assert backend.count("requests_aborted_total", cause="api") == 1
        backend.inflight.leave(other)

    scripted(test)


def test_scheduler_that_ignores_an_abort_or_a_deadline_is_not_waited_for(short_grace: None) -> None:
    async def test(backend: Backend) -> None:
        answer = await backend.accept("r", timeout_s=0.01)
        await backend.send("r", "ab")
        events = [event async for batch in answer.batches() for event in batch]
        assert (events[-1].finish, events[-1].stop_reason, events[-1].num_tokens) == ("abort", "deadline", 2)
        assert await backend.sent_to(backend.scheduler) == AbortRequest("r", "deadline")
        assert await backend.sent_to(backend.detokenizer) == AbortRequest("r", "shutdown")

    scripted(test)


def test_output_that_nobody_reads_is_given_up() -> None:
    async def test(backend: Backend) -> None:
        answer = await backend.accept("r")
        answer.unread_since_s = asyncio.get_running_loop().time() - 61.0  # the limit is 60
        await backend.send("r", "ab")
        assert backend.count("requests_aborted_total", cause="client") == 1
        assert await backend.sent_to(backend.scheduler) == AbortRequest("r", "client")

    scripted(test)


def test_call_that_never_returns_after_the_end_is_cancelled(short_grace: None) -> None:
    async def test(backend: Backend) -> None:
        await backend.accept("r")
        await backend.send("r", "ab", finish="length")
        await settle(lambda: backend.calls["r"].cancelled())

    scripted(test)


def test_lost_detokenizer_fails_the_requests_behind_it() -> None:
    async def test(backend: Backend) -> None:
        answer = await backend.accept("r")
        assert backend.inflight.detokenizers_in_use() == {backend.detokenizer.endpoint}
        backend.inflight.lose_detokenizers({"elsewhere"})
        assert len(backend.inflight) == 1
        backend.inflight.lose_detokenizers({backend.detokenizer.endpoint})
        assert (await error_of(answer)).code == "engine_failed"
        assert backend.inflight.detokenizers_in_use() == set()

    scripted(test)


def test_one_bad_delta_ends_only_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(backend: Backend) -> None:
        broken = await backend.accept("r")
        fine = await backend.accept("s")
        monkeypatch.setattr(broken, "push", lambda *_: 1 / 0)
        await backend.send("r", "ab")
        await backend.send("s", "ab", finish="length")
        assert (await error_of(broken)).code == "internal_error"
        assert fine.complete

    scripted(test)


def test_detokenizer_is_told_of_a_request_before_its_output() -> None:
    async def test(backend: Backend) -> None:
        await backend.accept("a", n=3)
        assert backend.detokenizer.drain(5.0) == [Expect("a", 3)]
        for choice in range(3):
            await backend.send("a", "x", choice=choice, finish="length")

    scripted(test)


def test_every_call_runs_in_a_context_of_its_own() -> None:
    """Two Serve calls under the id of one HTTP request can hang (RAY.md C, pitfall 2)."""
    var = contextvars.ContextVar("var", default="unset")

    async def test(backend: Backend) -> None:
        var.set("the request's")
        answer = await backend.accept("r", "s")
        assert [context.get(var, "unset") for context in backend.contexts] == ["unset", "unset"]
        backend.inflight.leave(answer)

    scripted(test)


def test_close_ends_what_is_open_with_shutdown(short_grace: None) -> None:
    async def test(backend: Backend) -> None:
        started = await backend.accept("r")
        waiting = await backend.accept("s")
        await backend.send("r", "ab")
        await backend.inflight.close()
        assert started.choices[0].stop_reason == "shutdown"
        assert (await error_of(waiting)).code == "server_draining"
        assert backend.count("requests_aborted_total", cause="shutdown") == 2

    scripted(test)


def test_prompts_of_one_request_are_started_a_window_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflight, "WINDOW_CHOICES", 4)

    async def test(backend: Backend) -> None:
        rids = [f"p{i}" for i in range(5)]
        answer = Answer("", [3] * 5, 2, asyncio.get_running_loop().time())
        backend.inflight.accept(answer, [backend.request(rid, 2) for rid in rids], None)
        await settle(lambda: len(backend.calls) == 2)
        for number, rid in enumerate(rids):
            assert list(backend.calls) == rids[: number + 2]
            for choice in (0, 1):
                await backend.send(rid, "x", choice=choice, finish="length")
        assert answer.complete and [choice.num_tokens for choice in answer.choices] == [1] * 10

    scripted(test)


def test_prompts_that_have_not_started_end_with_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflight, "WINDOW_CHOICES", 1)

    async def test(backend: Backend) -> None:
        answer = Answer("label", [3] * 3, 1, asyncio.get_running_loop().time())
        backend.inflight.accept(answer, [backend.request(rid) for rid in "abc"], None)
        await settle(lambda: list(backend.calls) == ["a"])
        await backend.send("a", "x")
        assert backend.inflight.abort("label") == 1
        assert [choice.finish for choice in answer.choices] == [None, "abort", "abort"]
        await backend.send("a", "", 1, finish="abort", stop_reason="api")
        assert answer.complete and list(backend.calls) == ["a"]

    scripted(test)


def test_least_used_detokenizer_is_chosen_in_turn() -> None:
    async def test(backend: Backend) -> None:
        chosen = [backend.inflight.choose_detokenizer(["a", "b", "c"]) for _ in range(6)]
        assert sorted(chosen) == ["a", "a", "b", "b", "c", "c"]
        answer = await backend.accept("r")
        used = backend.detokenizer.endpoint
        assert {backend.inflight.choose_detokenizer([used, "b"]) for _ in range(4)} == {"b"}
        backend.inflight.leave(answer)

    scripted(test)
