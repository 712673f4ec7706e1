"""`InFlight`: the accepted requests of one ingress replica, each from its start to its one end.

    submit(GenerateRequest)  one open call per prompt, a task each      -> its failure or its silent end
    Inbox (zmq)              TextDelta -> PromptStream -> Answer         -> terminal deltas
    leave, abort, deadline   AbortRequest to the scheduler, or the call's cancellation

Owns the inbox, the streams and all counters of accepted requests. Knows neither text nor HTTP nor who is in the cluster. All on
one event loop.

Counting unit: one HTTP request, whatever its prompts and n. It *failed* if it ended with an error of ours, else it was *aborted*
if any choice was ended from outside, else it *finished* with the reason of choice 0. It ends when its last terminal delta
arrives here; a client that leaves after that changes nothing.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence

import msgspec

from overlap_serve.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    QueueFull,
    RequestAborted,
    RequestError,
    ServerUnavailable,
)
from overlap_serve.messages import AbortRequest, Expect, Failure, GenerateRequest, TextDelta
from overlap_serve.metrics import IngressMetrics, TransportMetrics
from overlap_serve.runtime.streams import Answer, PromptStream
from overlap_serve.sampling import AbortCause
from overlap_serve.transport import Inbox, Outbox

log = logging.getLogger(__name__)

GRACE_S = 5.0  # for terminal deltas after an abort, a deadline or the end of a submit call; then the ingress ends the request itself
RETRY_S = 1.0
# Choices of one HTTP request that a scheduler gets at once; its other prompts follow as these end. One request of 1,024 prompts must
# neither fill the queue for everybody nor be refused for its size.
WINDOW_CHOICES = 64

# One open call per prompt: returns when the request has ended in the scheduler, raises RequestError when it cannot run or its
# scheduler died; cancelling the task cancels the request.
Submit = Callable[[GenerateRequest], Awaitable[None]]

_CAUSES: dict[str, AbortCause] = {
    "deadline_exceeded": "deadline",
    "request_aborted": "api",
    "server_draining": "shutdown",
}


class InFlight:
    """bind: zmq address of the inbox. slow_client_s: how long a reader may leave output untouched."""

    def __init__(
        self,
        bind: str,
        key: bytes,
        submit: Submit,
        metrics: IngressMetrics,
        hops: TransportMetrics,
        slow_client_s: float,
    ) -> None:
        self._submit = submit
        self._metrics = metrics
        self._slow_client_s = slow_client_s
        self._inbox = Inbox(bind, key, refused=hops.refused)
        self._to_scheduler = Outbox(key, "ingress_scheduler", sent=hops.sent, dropped=hops.dropped)
        self._to_detokenizer = Outbox(key, "ingress_detokenizer", sent=hops.sent, dropped=hops.dropped)
        self._answers: dict[Answer, None] = {}  # open, in order of arrival
        self._streams: dict[str, PromptStream] = {}  # open, by our own request id
        self._tasks: set[asyncio.Task[None]] = set()
        self._used: Counter[str] = Counter()  # open prompts per detokenizer
        self._turn = 0
        self._closed = False
        self.num_unstarted = 0  # choices whose prompt has had no output yet

    @property
    def endpoint(self) -> str:
        """Where detokenizers send."""
        return self._inbox.endpoint

    def __len__(self) -> int:
        return len(self._answers)

    def start(self) -> None:
        """Receive on the running event loop."""
        asyncio.get_running_loop().add_reader(self._inbox.fileno(), self._receive)
        self._receive()  # the descriptor is edge-triggered: what came before it was watched fires nothing

    async def close(self) -> None:
        """End what is open with abort/shutdown, then release the sockets. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for answer in list(self._answers):
            self._abort(answer, "shutdown")
        horizon_s = self._now() + GRACE_S
        while self._answers and self._now() < horizon_s:
            await asyncio.sleep(0.02)
        for stream in list(self._streams.values()):
            self._cut(stream, "shutdown")
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        asyncio.get_running_loop().remove_reader(self._inbox.fileno())
        self._inbox.close()
        self._to_scheduler.close()
        self._to_detokenizer.close()

    def check_at_rest(self) -> None:
        """AssertionError unless nothing is left of any request; for tests."""
        assert not self._answers, f"{len(self._answers)} requests are open"
        assert not self._streams and not self._used and self.num_unstarted == 0, "prompts are left without a request"
        assert not self._tasks, f"{len(self._tasks)} submit calls are open"

    # -- begins

    def accept(self, answer: Answer, requests: Sequence[GenerateRequest], timeout_s: float | None) -> None:
        """Start one request for each prompt of the answer. From here on it is accepted, and ends once."""
        self._answers[answer] = None
        self._metrics.accepted.inc()
        self._metrics.open.inc()
        answer.accepted_s = self._now()
        answer.unopened.extend(PromptStream(answer, request, i * request.n) for i, request in enumerate(requests))
        for _ in range(min(len(requests), max(1, WINDOW_CHOICES // answer.n))):
            self._open(answer.unopened.popleft())
        if timeout_s is not None:
            # The scheduler keeps deadlines; this is for one that does not answer.
            backstop_s = timeout_s + GRACE_S
            answer.backstop = asyncio.get_running_loop().call_later(backstop_s, self._abort, answer, "deadline")

    def _open_next(self, answer: Answer) -> None:
        """A prompt of many has ended: start another, with the time that is left."""
        if answer.unopened and answer in self._answers:
            stream = answer.unopened.popleft()
            stream.request = msgspec.structs.replace(stream.request, continued=True)
            timeout_s = stream.request.timeout_s
            if timeout_s is not None:
                left_s = max(0.001, timeout_s - (self._now() - answer.accepted_s))
                stream.request = msgspec.structs.replace(stream.request, timeout_s=left_s)
            self._open(stream)

    def _open(self, stream: PromptStream) -> None:
        stream.answer.streams.append(stream)
        self._streams[stream.request.rid] = stream
        self._used[stream.request.route.detokenizer] += 1
        self.num_unstarted += stream.request.n
        expect = Expect(stream.request.rid, stream.request.n)
        self._to_detokenizer.send(stream.request.route.detokenizer, [expect])
        # A fresh context: two Serve calls of one HTTP request would share an id, and one could hang (RAY.md C, pitfall 2).
        stream.task = contextvars.Context().run(asyncio.create_task, self._run(stream))
        self._tasks.add(stream.task)
        stream.task.add_done_callback(self._tasks.discard)

    def choose_detokenizer(self, endpoints: Sequence[str]) -> str:
        """The least used by this replica, in turn among equals. endpoints: not empty."""
        self._turn = (self._turn + 1) % len(endpoints)
        return min((*endpoints[self._turn :], *endpoints[: self._turn]), key=lambda endpoint: self._used[endpoint])

    def detokenizers_in_use(self) -> set[str]:
        return set(self._used)

    # -- ends from outside

    def leave(self, answer: Answer) -> None:
        """Its reader is gone. Ends what still runs with abort/client; nothing to do after the end."""
        if answer in self._answers:
            self._leave(answer)

    def abort(self, label: str | None) -> int:
        """Abort the open requests with this client request id (None: all). Returns their number."""
        answers = [answer for answer in self._answers if label is None or answer.label == label]
        for answer in answers:
            self._abort(answer, "api")
        return len(answers)

    def lose_detokenizers(self, gone: Collection[str]) -> None:
        """Fail the requests whose output would come through these endpoints."""
        for stream in list(self._streams.values()):
            if stream.request.route.detokenizer in gone:
                self._lose(stream, ServerUnavailable("the detokenizer stopped while it worked on this request"))

    def _abort(self, answer: Answer, cause: AbortCause) -> None:
        """Ask for the end; the terminal deltas follow, and if they do not, `_cut` stands in for them."""
        unopened = list(answer.unopened)
        answer.unopened.clear()
        for stream in unopened:
            self._cut_unopened(stream, cause)
        for stream in answer.streams:
            if stream.request.rid not in self._streams:
                continue
            self._stop(stream, cause)
            if stream.scheduler:
                asyncio.get_running_loop().call_later(GRACE_S, self._cut, stream, cause)
            else:
                self._cut(stream, cause)

    def _cut_unopened(self, stream: PromptStream, cause: AbortCause) -> None:
        for delta in stream.terminals(cause):
            if stream.answer in self._answers:
                self._deliver(stream, delta)

    def _cut(self, stream: PromptStream, cause: AbortCause) -> None:
        """End a prompt here, without its scheduler."""
        if stream.request.rid in self._streams:
            self._tell_detokenizer(stream)
        for delta in stream.terminals(cause):
            if stream.request.rid in self._streams:
                self._deliver(stream, delta)

    # -- deltas in

    def _receive(self) -> None:
        for message in self._inbox.drain():
            if not isinstance(message, TextDelta):
                log.warning("refused a %s: an ingress takes text deltas only", type(message).__name__)
                continue
            stream = self._streams.get(message.rid)
            try:
                self._deliver(stream, message)
            except Exception:
                # One bad delta must not stop all streams; its own request ends with the reason.
                log.exception("request %s: a delta could not be delivered", message.rid)
                if stream is not None and stream.answer in self._answers:
                    self._fail(stream.answer, InternalError("the server failed while it handled the output"))

    def _deliver(self, stream: PromptStream | None, delta: TextDelta) -> None:
        verdict = "late" if stream is None else stream.judge(delta)
        if stream is None or verdict == "late":
            self._metrics.late_deltas.inc()
            return
        if delta.scheduler and not stream.scheduler:
            stream.scheduler = delta.scheduler
            self.num_unstarted -= stream.request.n
        self._observe(stream, delta)
        if verdict == "gap":
            self._fail(stream.answer, ServerUnavailable("output of this request was lost inside the server"))
        elif delta.failure is not None or delta.finish == "error":
            self._fail(stream.answer, error_of(delta.failure))
        elif delta.finish == "abort" and not delta.num_tokens and not stream.answer.num_tokens:
            self._fail(stream.answer, aborted(str(delta.stop_reason)))
        else:
            self._push(stream, delta)

    def _push(self, stream: PromptStream, delta: TextDelta) -> None:
        answer = stream.answer
        stream.push(delta, self._now())
        if delta.finish == "stop" and isinstance(delta.stop_reason, str):
            self._stop(stream, "stop", delta.choice)  # only the detokenizer knows; the scheduler still runs the choice
        if stream.complete:
            self._forget(stream)
            self._open_next(answer)
        if answer.complete:
            self._finish(answer)
        elif answer.unread_since_s is not None and self._now() - answer.unread_since_s > self._slow_client_s:
            self._leave(answer)

    def _observe(self, stream: PromptStream, delta: TextDelta) -> None:
        now_s = self._now()
        answer = stream.answer
        last_s = stream.choice(delta).last_s
        if delta.token_ids and not answer.got_tokens:
            answer.got_tokens = True
            self._metrics.ttft.observe(now_s - answer.arrival_s)
        elif delta.token_ids and last_s:
            self._metrics.itl.observe((now_s - last_s) / len(delta.token_ids))

    # -- submit calls

    async def _run(self, stream: PromptStream) -> None:
        """The open call of one prompt. Its end without a terminal delta is the only sign of a dead detokenizer."""
        try:
            await self._submit(stream.request)
        except asyncio.CancelledError:
            # By us: the stream is forgotten already. By whoever runs the call: the request is lost.
            self._lose(stream, ServerUnavailable("the call to the scheduler was cancelled"))
            raise
        except RequestError as error:
            self._lose(stream, error)
        except Exception as error:
            log.warning("request %s: the scheduler call failed: %r", stream.request.rid, error)
            self._lose(stream, ServerUnavailable("the engine stopped while it worked on this request"))
        else:
            if not stream.complete:
                lost = ServerUnavailable("the end of this request's output was lost inside the server")
                asyncio.get_running_loop().call_later(GRACE_S, self._lose, stream, lost)

    def _lose(self, stream: PromptStream, error: RequestError) -> None:
        """The scheduler will send nothing more for this prompt."""
        if stream.request.rid in self._streams:
            self._tell_detokenizer(stream)
            self._fail(stream.answer, error)

    def _tell_detokenizer(self, stream: PromptStream) -> None:
        """Forget this prompt: no terminal output will come to end it."""
        self._to_detokenizer.send(stream.request.route.detokenizer, [AbortRequest(stream.request.rid, "shutdown")])

    def _stop(self, stream: PromptStream, cause: AbortCause, choice: int | None = None) -> None:
        """Tell whoever runs the prompt. Before the first delta nobody's address is known: the open call is cancelled."""
        if stream.scheduler:
            self._to_scheduler.send(stream.scheduler, [AbortRequest(stream.request.rid, cause, choice)])
        elif stream.task is not None:
            stream.task.cancel()

    def _forget(self, stream: PromptStream) -> None:
        """Later deltas of this prompt are late. Its call gets a moment to return by itself."""
        if self._streams.pop(stream.request.rid, None) is None:
            return
        detokenizer = stream.request.route.detokenizer
        self._used[detokenizer] -= 1
        if not self._used[detokenizer]:
            del self._used[detokenizer]
        if not stream.scheduler:
            self.num_unstarted -= stream.request.n
        if stream.task is not None and not stream.task.done():
            timer = asyncio.get_running_loop().call_later(GRACE_S, stream.task.cancel)
            stream.task.add_done_callback(lambda _: timer.cancel())

    # -- ends: each answer passes through exactly one of _finish, _fail, _leave

    def _finish(self, answer: Answer) -> None:
        """All terminal deltas have come."""
        aborted_by = next((choice.stop_reason for choice in answer.choices if choice.finish == "abort"), None)
        if aborted_by is not None:
            self._metrics.aborted(str(aborted_by))
            self._end(answer, "abort")
        else:
            reason = str(answer.choices[0].finish)
            self._metrics.finished(reason)
            self._end(answer, reason)

    def _fail(self, answer: Answer, error: RequestError) -> None:
        """End with an error, whatever its choices still do."""
        cause = _CAUSES.get(error.code)
        for stream in answer.streams:
            if stream.request.rid in self._streams:
                self._stop(stream, cause or "shutdown")
        if cause is None:
            self._metrics.failed(error.code)
            self._end(answer, "error")
        else:
            self._metrics.aborted(cause)
            self._end(answer, "abort")
        answer.fail(error)

    def _leave(self, answer: Answer) -> None:
        """Nobody reads any more."""
        for stream in answer.streams:
            if stream.request.rid in self._streams:
                self._stop(stream, "client")
        self._metrics.aborted("client")
        self._end(answer, "abort")
        answer.fail(RequestAborted("the client has left or stopped reading"))

    def _end(self, answer: Answer, reason: str) -> None:
        assert answer in self._answers, "an answer ends once"
        del self._answers[answer]
        answer.unopened.clear()
        if answer.backstop is not None:
            answer.backstop.cancel()
        for stream in answer.streams:
            self._forget(stream)
        self._metrics.open.dec()
        self._metrics.e2e.observe(self._now() - answer.arrival_s)
        self._metrics.tokens(sum(answer.prompt_tokens), answer.num_tokens, reason)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def aborted(cause: str) -> RequestError:
    """The error of a request that was aborted before any output (http-api section 3, finish_reason)."""
    if cause == "deadline":
        return DeadlineExceeded("the request's time limit passed before any output; raise timeout_s or send less")
    if cause == "shutdown":
        return ServerUnavailable("the server is shutting down", code="server_draining", retry_after_s=RETRY_S)
    return RequestAborted("the request was aborted before any output")


def error_of(failure: Failure | None) -> RequestError:
    """What a scheduler or detokenizer reported, as an error of ours."""
    if failure is None:
        return InternalError("the server failed while it worked on this request")
    kind: type[RequestError]
    match failure.http_status:
        case 400:
            kind = ContextLengthExceeded if failure.code == ContextLengthExceeded.code else InvalidRequest
            return kind(failure.message, code=failure.code)
        case 408:
            return DeadlineExceeded(failure.message, code=failure.code)
        case 409:
            return RequestAborted(failure.message, code=failure.code)
        case 429:
            return QueueFull(failure.message, code=failure.code, retry_after_s=RETRY_S)
        case 503:
            return ServerUnavailable(failure.message, code=failure.code, retry_after_s=RETRY_S)
        case _:
            return InternalError(failure.message, code=failure.code)
