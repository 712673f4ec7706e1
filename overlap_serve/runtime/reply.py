"""`Reply`: what an admitted request sends back, as bytes of an event stream or as one JSON body.

Owns the way from deltas to the formats of `overlap_serve.openai`, and running usage. Knows no HTTP: whoever writes the bytes must
`close` it in the end, read or not.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import msgspec

from overlap_serve.errors import RequestError
from overlap_serve.messages import TextDelta, unpack_ids
from overlap_serve.openai.protocol import ChatRequest, CompletionRequest
from overlap_serve.openai.response import AnswerHead, ChoiceResult, Usage, chat_completion, text_completion
from overlap_serve.openai.stream import PING, ChatChunks, CompletionChunks
from overlap_serve.runtime.prepare import Prepared
from overlap_serve.runtime.shown import Shown
from overlap_serve.runtime.streams import Answer, merge
from overlap_serve.text.tokenizer import Tokenizer


class Reply:
    """One reader. leave: tells the owner that nobody reads any more."""

    def __init__(
        self,
        prepared: Prepared,
        answer: Answer,
        fingerprint: str,
        leave: Callable[[Answer], None],
        tokenizer: Tokenizer,
    ) -> None:
        self.request = prepared.request
        self._prepared = prepared
        self._answer = answer
        self._leave = leave
        self._num_tokens = [0] * len(answer.choices)  # as delivered; the answer may be ahead
        self._prompt_token_ids = (
            [unpack_ids(prompt) for prompt in prepared.prompts] if self.request.return_token_ids else None
        )
        self._scoring = isinstance(self.request, CompletionRequest) and self.request.scoring
        self._shown = Shown(prepared, tokenizer)
        prefix = "chatcmpl" if isinstance(self.request, ChatRequest) else "cmpl"
        self._head = AnswerHead(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), self.request.model, fingerprint)

    @property
    def label(self) -> str:
        """The client's id of this request."""
        return self._answer.label

    async def first(self) -> None:
        """Return when output is there. Raises the RequestError of a request that ended before any."""
        await self._answer.first()

    async def events(self, ping_s: float) -> AsyncGenerator[bytes, None]:
        """The event stream: everything that has arrived in one piece. A comment after ping_s without a delta."""
        chunks = self._chunks()
        try:
            async with aclosing(self._answer.batches(ping_s)) as batches:
                async for batch in batches:
                    events = [self._encode(chunks, delta) for arrived in batch for delta in self._take(arrived)]
                    if data := b"".join(events if batch else [PING]):
                        yield data
            yield chunks.finish(self._usage())
        except RequestError as error:
            yield chunks.error(error)

    async def body(self) -> dict[str, object]:
        """The whole answer. Raises the RequestError of a request that failed."""
        deltas: list[list[TextDelta]] = [[] for _ in self._num_tokens]
        async for batch in self._answer.batches():
            for arrived in batch:
                for delta in self._take(arrived):
                    deltas[delta.choice].append(delta)
                    self._num_tokens[delta.choice] = delta.num_tokens
        return self._body([self._choice_result(index, of_choice) for index, of_choice in enumerate(deltas)])

    def close(self) -> None:
        """Nobody reads any more. Ends the request if it still runs."""
        self._leave(self._answer)

    def _take(self, delta: TextDelta) -> Sequence[TextDelta]:
        """What can be shown now that this delta has come."""
        return self._shown.in_order(hide_token(delta) if self._scoring else delta)

    def _encode(self, chunks: ChatChunks | CompletionChunks, delta: TextDelta) -> bytes:
        self._num_tokens[delta.choice] = delta.num_tokens
        usage = self._usage() if self.request.continuous_usage else None
        begin = b""
        if self._prepared.echoes and isinstance(chunks, CompletionChunks) and self._shown.begins(delta.choice):
            begin = chunks.begin(delta.choice, self._shown.echo(delta.choice), self._shown.of_echo(delta.choice), usage)
        logprobs = self._shown.of_tokens(delta)
        return begin + chunks.delta(
            delta.choice, delta.text, delta.token_ids, delta.finish, delta.stop_reason, usage, logprobs
        )

    def _choice_result(self, index: int, deltas: Sequence[TextDelta]) -> ChoiceResult:
        """All deltas of one ended choice as one."""
        whole = merge(deltas)
        assert whole.finish is not None, f"choice {index} has not ended"
        return ChoiceResult(
            index=index,
            text=self._shown.echo(index) + whole.text,
            finish_reason=whole.finish,
            stop_reason=whole.stop_reason,
            token_ids=whole.token_ids,
            logprobs=self._shown.of_choice(whole),
            prompt_logprobs=self._shown.of_prompt(index),
        )

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=sum(self._answer.prompt_tokens),
            completion_tokens=sum(self._num_tokens),
            cached_tokens=sum(self._answer.cached_tokens),
        )

    def _chunks(self) -> ChatChunks | CompletionChunks:
        kind = ChatChunks if isinstance(self.request, ChatRequest) else CompletionChunks
        return kind(
            self._head,
            include_usage=self.request.include_usage,
            continuous_usage=self.request.continuous_usage,
            prompt_token_ids=self._prompt_token_ids,
            n=self.request.n,
            stop_strings=self._prepared.stop_strings,
        )

    def _body(self, choices: Sequence[ChoiceResult]) -> dict[str, object]:
        make = chat_completion if isinstance(self.request, ChatRequest) else text_completion
        return make(
            self._head,
            choices,
            self._usage(),
            prompt_token_ids=self._prompt_token_ids,
            stop_strings=self._prepared.stop_strings,
        )


def hide_token(delta: TextDelta) -> TextDelta:
    """A delta of a request that wants only its prompt back: the token that was generated for it never happened."""
    finish = "length" if delta.finish == "stop" else delta.finish
    reason = delta.stop_reason if finish == "abort" else None
    return msgspec.structs.replace(
        delta, token_ids=(), text="", num_tokens=0, logprobs=(), finish=finish, stop_reason=reason
    )
