"""The streams of an ingress: what one HTTP request receives, and which deltas are its own.

Owns the buffers between the zmq inbox and the HTTP writer, and the order rules of deltas. Knows no sockets and no HTTP.

    Answer         one HTTP request; one reader; numbers its choices prompt_index * n + choice
      PromptStream one prompt of it = one request id of ours; drops what is late, repeated or of a dead attempt

The one idea: an answer *ends* when the last terminal delta arrives (or it is failed or left), not when somebody has read it. So
counters and per-request state never depend on a client that has stopped reading.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from overlap_serve.errors import RequestError
from overlap_serve.messages import GenerateRequest, TextDelta
from overlap_serve.sampling import AbortCause, FinishReason

MAX_EVENTS = 256  # per choice; a slower reader gets merged deltas (http-api section 4)

Verdict = Literal["new", "late", "gap"]


def merge(deltas: Sequence[TextDelta]) -> TextDelta:
    """Consecutive deltas of one choice as one; nothing is lost. Text offset and what only the first of a choice says are the first's."""
    first, last = deltas[0], deltas[-1]
    if first is last:
        return first
    return msgspec.structs.replace(
        first,
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        text="".join(delta.text for delta in deltas),
        num_tokens=last.num_tokens,
        finish=last.finish,
        stop_reason=last.stop_reason,
        failure=last.failure,
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
    )


@dataclass
class Choice:
    """How far one choice has come. num_tokens counts for usage; finish is set once, by its terminal delta."""

    num_tokens: int = 0
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    last_s: float = 0.0  # when its latest delta arrived; 0: none yet


class Answer:
    """Events of one HTTP request. Written by the frontend, read by one consumer, both on the event loop.

    label: the client's request id. prompt_tokens: of each prompt; choice c belongs to prompt c // n. interval_s: deltas that follow
    an earlier batch within this time are delivered together, the first never waits.
    """

    def __init__(
        self, label: str, prompt_tokens: Sequence[int], n: int, arrival_s: float, interval_s: float = 0.0
    ) -> None:
        self.label = label
        self.n = n
        self.arrival_s = arrival_s
        self.prompt_tokens = tuple(prompt_tokens)
        self.cached_tokens = [0] * len(prompt_tokens)
        self.choices = [Choice() for _ in range(len(prompt_tokens) * n)]
        self.streams: list[PromptStream] = []
        self.unopened: deque[PromptStream] = deque()  # prompts that wait for others of this answer to end
        self.accepted_s = arrival_s
        self.got_tokens = False
        self.backstop: asyncio.TimerHandle | None = None
        self.unread_since_s: float | None = None
        self._interval_s = interval_s
        self._open = len(self.choices)
        self._pending: dict[int, list[TextDelta]] = {}
        self._error: RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def complete(self) -> bool:
        """Every choice has its terminal delta."""
        return self._open == 0

    @property
    def num_tokens(self) -> int:
        """Generated tokens of all choices, as usage counts them."""
        return sum(choice.num_tokens for choice in self.choices)

    def push(self, delta: TextDelta, now_s: float) -> None:
        """One delta in order; `delta.choice` is already the answer's own index."""
        choice = self.choices[delta.choice]
        assert choice.finish is None, f"choice {delta.choice} has ended"
        choice.num_tokens, choice.last_s = delta.num_tokens, now_s
        choice.finish, choice.stop_reason = delta.finish, delta.stop_reason
        self._open -= delta.finish is not None
        pending = self._pending.setdefault(delta.choice, [])
        if len(pending) >= MAX_EVENTS:
            pending[:] = [merge(pending)]
        pending.append(delta)
        if self.unread_since_s is None:
            self.unread_since_s = now_s
        self._wake()

    def fail(self, error: RequestError) -> None:
        """End with an error; the reader still gets what was pushed before."""
        assert self._error is None and not self.complete, "an answer ends once"
        self._error = error
        self._wake()

    async def first(self) -> None:
        """Return when there is something to send, so that the status line can still tell of a failure.

        Raises the RequestError of an answer that failed before any delta.
        """
        while self.unread_since_s is None and not self._over():
            await self._wait(None)
        if self.unread_since_s is None and self._error is not None:
            raise self._error

    async def batches(self, idle_s: float | None = None) -> AsyncGenerator[list[TextDelta], None]:
        """Everything that has arrived since the last batch, until the end. An empty batch: nothing came for idle_s seconds.

        Raises the RequestError of an answer that failed, after the deltas that came before it.
        """
        loop = asyncio.get_running_loop()
        earliest_s = 0.0
        while True:
            if self.unread_since_s is None and not self._over():
                await self._wait(idle_s)
            if self._interval_s and not self._over() and (delay_s := earliest_s - loop.time()) > 0:
                await asyncio.sleep(delay_s)
            if self.unread_since_s is not None:
                earliest_s = loop.time() + self._interval_s
                yield self._take()
            elif self._error is not None:
                raise self._error
            elif self.complete:
                return
            else:
                yield []

    def _over(self) -> bool:
        return self.complete or self._error is not None

    def _take(self) -> list[TextDelta]:
        pending, self._pending = self._pending, {}
        self.unread_since_s = None
        if self._interval_s:
            return [merge(deltas) for deltas in pending.values()]
        return [delta for deltas in pending.values() for delta in deltas]

    async def _wait(self, timeout_s: float | None) -> None:
        # One future and a timer instead of asyncio.wait_for: this runs once per token and stream.
        assert self._waiter is None, "an answer has one reader"
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = None if timeout_s is None else loop.call_later(timeout_s, self._wake)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class PromptStream:
    """One prompt of an answer: one GenerateRequest, one open submit call, n choices.

    base: index of its first choice in the answer. scheduler: where aborts go; the frontend learns it from the first delta.
    """

    def __init__(self, answer: Answer, request: GenerateRequest, base: int) -> None:
        self.answer = answer
        self.request = request
        self.base = base
        self.scheduler = ""
        self.task: asyncio.Task[None] | None = None
        self._next_index = [0] * request.n
        self._open = request.n

    @property
    def complete(self) -> bool:
        return self._open == 0

    def choice(self, delta: TextDelta) -> Choice:
        return self.answer.choices[self.base + delta.choice]

    def judge(self, delta: TextDelta) -> Verdict:
        """Is this the next delta of its choice? Late: of another attempt, repeated, or after the end. Gap: tokens were lost."""
        if delta.attempt != self.request.attempt or not 0 <= delta.choice < self.request.n:
            return "late"
        expected = self._next_index[delta.choice]
        if self.choice(delta).finish is not None or delta.first_index < expected:
            return "late"
        return "new" if delta.first_index == expected else "gap"

    def push(self, delta: TextDelta, now_s: float) -> None:
        """Hand a new delta (see `judge`) to the answer."""
        self._next_index[delta.choice] = delta.first_index + len(delta.token_ids)
        self._open -= delta.finish is not None
        if delta.choice == 0 and delta.cached_tokens >= 0:
            # Of choice 0 only: later choices find the prompt that this one has just computed (SGLang #5525).
            self.answer.cached_tokens[self.base // self.request.n] = delta.cached_tokens
        if self.base:
            delta = msgspec.structs.replace(delta, choice=self.base + delta.choice)
        self.answer.push(delta, now_s)

    def terminals(self, cause: AbortCause) -> list[TextDelta]:
        """Abort deltas for the choices that have none, when nobody else will send them."""
        return [
            TextDelta(
                rid=self.request.rid,
                attempt=self.request.attempt,
                choice=index,
                first_index=self._next_index[index],
                token_ids=(),
                text="",
                num_tokens=choice.num_tokens,
                finish="abort",
                stop_reason=cause,
            )
            for index, choice in enumerate(self.answer.choices[self.base : self.base + self.request.n])
            if choice.finish is None
        ]
