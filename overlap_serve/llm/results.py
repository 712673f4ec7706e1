"""Results of `LLM`, and how deltas become them."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass

from overlap_serve.messages import GenerateRequest, Route, TextDelta, unpack_ids
from overlap_serve.openai.response import Usage, client_stop_reason
from overlap_serve.runtime.prepare import Prepared
from overlap_serve.runtime.streams import merge
from overlap_serve.sampling import FinishReason, TokenLogprob


@dataclass(frozen=True)
class Choice:
    """One answer to a prompt. finish_reason and stop_reason as in the HTTP API. token_ids: up to the cut.

    logprobs: one for each of token_ids; None if none were asked for.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprob, ...] | None


@dataclass(frozen=True)
class Completion:
    """What became of one prompt: its `n` choices. prompt_logprobs: one for each prompt token; None if none were asked for."""

    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text


@dataclass(frozen=True)
class Piece:
    """Text that has just become certain. finish_reason: set on the last one."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None


class Answer:
    """One prompt on its way: its deltas until all choices have ended."""

    def __init__(self, index: int, prepared: Prepared, arrival_s: float) -> None:
        [self._prompt], [self._sampling] = prepared.prompts, prepared.sampling
        self.index = index
        self.rid = uuid.uuid4().hex
        self._prepared = prepared
        self._arrival_s = arrival_s
        self._deltas: list[list[TextDelta]] = [[] for _ in range(prepared.request.n)]
        self._open = prepared.request.n

    def request(self, route: Route) -> GenerateRequest:
        request = self._prepared.request
        timeout_s = request.timeout_s
        if timeout_s is not None:
            timeout_s = max(0.0, timeout_s - (time.monotonic() - self._arrival_s))
        return GenerateRequest(
            rid=self.rid,
            attempt=0,
            prompt=self._prompt,
            n=request.n,
            sampling=self._sampling,
            text=self._prepared.text,
            route=route,
            priority=request.priority,
            timeout_s=timeout_s,
            cache_salt=request.cache_salt,
        )

    def add(self, delta: TextDelta) -> bool:
        """Whether that was the last one."""
        self._deltas[delta.choice].append(delta)
        self._open -= delta.finish is not None
        return self._open == 0

    def stop_reason(self, delta: TextDelta) -> str | int | None:
        if delta.finish is None:
            return None
        return client_stop_reason(delta.finish, delta.stop_reason, self._prepared.stop_strings)

    def completion(self) -> Completion:
        prompt = tuple(unpack_ids(self._prompt))
        first = self._deltas[0]
        usage = Usage(
            prompt_tokens=len(prompt),
            completion_tokens=sum(deltas[-1].num_tokens for deltas in self._deltas),
            # Of choice 0 only: later choices find the prompt that this one has just computed.
            cached_tokens=max(0, first[0].cached_tokens),
        )
        choices = tuple(self._choice(index, deltas) for index, deltas in enumerate(self._deltas))
        return Completion(prompt, choices, usage, next((d.prompt_logprobs for d in first if d.prompt_logprobs), None))

    def _choice(self, index: int, deltas: list[TextDelta]) -> Choice:
        whole = merge(deltas)
        assert whole.finish is not None, "a complete answer has only ended choices"
        logprobs = tuple(item for delta in deltas for item in delta.logprobs)
        asked = self._sampling.logprobs >= 0
        return Choice(
            index, whole.text, whole.token_ids, whole.finish, self.stop_reason(whole), logprobs if asked else None
        )
