"""`Preparer`: from the bytes of a request to token ids and parameters, in threads, so that a huge prompt stalls no stream.

Owns the two thread pools and their time limits: small requests never queue behind big ones. Decides nothing about admission.
Tokenizing releases the GIL; parsing, rendering and packing hold it for some ms per MB.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec

from overlap_serve.config import ModelFacts, ServeConfig
from overlap_serve.errors import ContextLengthExceeded, InvalidRequest, ModelLoadError, QueueFull, RequestError
from overlap_serve.messages import pack_ids
from overlap_serve.openai.echo import Echo, echo_of
from overlap_serve.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    RequestFacts,
    kept_prompt_tokens,
    parse_chat,
    parse_completion,
    parse_json,
    token_budget,
)
from overlap_serve.openai.tokenization import (
    TokenizeChat,
    TokenizeText,
    detokenize_body,
    parse_detokenize,
    parse_tokenize,
    tokenize_body,
)
from overlap_serve.sampling import SamplingParams, TextParams
from overlap_serve.text.template import ChatTemplate, TextModel

BIG_BODY_BYTES = 64 * 1024
POOL_THREADS = 2
RENDER_LIMIT_S = 10.0
QUEUE_LIMIT_S = 60.0
TOKENIZE_LIMIT_S = 60.0

T = TypeVar("T")


@dataclass(frozen=True)
class Body:
    """A request body as it came."""

    kind: Literal["chat", "completion"]
    data: bytes

    @property
    def big(self) -> bool:
        return len(self.data) > BIG_BODY_BYTES


@dataclass(frozen=True)
class Prepared:
    """A request that can run.

    prompts: int32 bytes (`pack_ids`); sampling: one for each prompt, with its own token budget. stop_strings: ids that stop only
    because their text is a stop string. echoes: one for each prompt if the answer begins with it, else none.
    """

    request: ChatRequest | CompletionRequest
    prompts: tuple[bytes, ...]
    sampling: tuple[SamplingParams, ...]
    text: TextParams
    stop_strings: Mapping[int, str]
    echoes: tuple[Echo, ...] = ()


@dataclass(frozen=True)
class Answered:
    """The answer of a request that needs no engine. body: JSON. ignored_fields: for `x-ignored-fields`."""

    body: bytes
    ignored_fields: tuple[str, ...]


class Preparer:
    def __init__(self, config: ServeConfig, text: TextModel, facts: ModelFacts) -> None:
        self._config = config
        self._text = text
        self.facts = request_facts(config, text, facts)
        self._small = ThreadPoolExecutor(POOL_THREADS, thread_name_prefix="prepare-small")
        self._big = ThreadPoolExecutor(POOL_THREADS, thread_name_prefix="prepare-big")

    async def parse(self, body: Body) -> ChatRequest | CompletionRequest:
        """Everything that can be refused without tokenizing. Raises InvalidRequest, NotFound."""
        if not body.big:
            return self._parse(body)  # well below a ms; a thread would cost as much
        return await self._reading(True, lambda: self._parse(body))

    async def tokenize(self, request: ChatRequest | CompletionRequest, big: bool, capacity_tokens: int) -> Prepared:
        """capacity_tokens: C of http-api section 2.3. Raises InvalidRequest, ContextLengthExceeded, QueueFull."""
        texts = await self._texts(request, big)
        return await self._reading(big, lambda: self._prepare(request, texts, capacity_tokens))

    def prepare_now(
        self, kind: Literal["chat", "completion"], fields: dict[str, object], capacity_tokens: int
    ) -> Prepared:
        """`parse` and `tokenize` of a decoded body in the calling thread, without time limits: offline nobody else waits.

        Raises InvalidRequest, ContextLengthExceeded.
        """
        request: ChatRequest | CompletionRequest
        texts: tuple[str | tuple[int, ...], ...]
        if kind == "chat":
            request = parse_chat(fields, self._config, self.facts)
            texts = (render_chat(request, self._text),)
        else:
            request = parse_completion(fields, self._config, self.facts)
            texts = request.prompts
        return self._prepare(request, texts, capacity_tokens)

    async def tokenize_only(self, data: bytes) -> Answered:
        """Body of POST /tokenize -> the ids that a generation would use. Raises InvalidRequest, NotFound, QueueFull."""
        big = len(data) > BIG_BODY_BYTES
        request = await self._reading(big, lambda: parse_tokenize(parse_json(data), self._config, self.facts))
        if isinstance(request, TokenizeChat):
            texts = await self._texts(request, big)
            return await self._reading(big, lambda: self._tokenized(request, texts, "messages"))
        return await self._reading(big, lambda: self._tokenized(request, request.texts, "prompt"))

    async def detokenize_only(self, data: bytes) -> Answered:
        """Body of POST /detokenize -> text. Raises InvalidRequest, NotFound, QueueFull."""
        return await self._reading(len(data) > BIG_BODY_BYTES, lambda: self._detokenized(data))

    def close(self) -> None:
        """Threads that still work end by themselves."""
        self._small.shutdown(wait=False, cancel_futures=True)
        self._big.shutdown(wait=False, cancel_futures=True)

    async def _reading(self, big: bool, work: Callable[[], T]) -> T:
        return await self._run(big, work, TOKENIZE_LIMIT_S, _busy())

    async def _run(self, big: bool, work: Callable[[], T], limit_s: float, too_slow: RequestError) -> T:
        """limit_s counts from the work's begin; waiting in line for a thread has a limit of its own, and ends with QueueFull.

        A thread cannot be stopped: past the limit its result is ignored.
        """
        loop = asyncio.get_running_loop()
        begun = asyncio.Event()

        def begin() -> T:
            loop.call_soon_threadsafe(begun.set)
            return work()

        future = loop.run_in_executor(self._big if big else self._small, begin)
        try:
            await asyncio.wait_for(begun.wait(), QUEUE_LIMIT_S)
        except asyncio.TimeoutError:
            future.cancel()
            raise _busy() from None
        try:
            return await asyncio.wait_for(future, limit_s)
        except asyncio.TimeoutError:
            raise too_slow from None

    def _parse(self, body: Body) -> ChatRequest | CompletionRequest:
        fields = parse_json(body.data)
        parse = parse_chat if body.kind == "chat" else parse_completion
        return parse(fields, self._config, self.facts)

    async def _texts(self, request: ChatRequest | CompletionRequest, big: bool) -> tuple[str | tuple[int, ...], ...]:
        """One text, or the ids that the client sent, for each prompt."""
        if isinstance(request, CompletionRequest):
            return request.prompts
        slow = InvalidRequest(
            f"the chat template did not end within {RENDER_LIMIT_S:g} s", code="chat_template_error", param="messages"
        )
        return (await self._run(big, lambda: render_chat(request, self._text), RENDER_LIMIT_S, slow),)

    def _prepare(
        self, request: ChatRequest | CompletionRequest, texts: tuple[str | tuple[int, ...], ...], capacity_tokens: int
    ) -> Prepared:
        param = "messages" if isinstance(request, ChatRequest) else "prompt"
        seed = secrets.randbits(63)
        prompts, sampling, echoes = [], [], []
        for text in texts:
            ids = self._ids(request, text, param, capacity_tokens)
            max_tokens = token_budget(
                len(ids),
                request.token_limit,
                max_model_len=self.facts.max_model_len,
                capacity_tokens=capacity_tokens,
                default_max_tokens=self._config.default_max_tokens,
                clamp=self._config.clamp_max_tokens,
                param=param,
            )
            prompts.append(pack_ids(ids))
            sampling.append(request.sampling(max_tokens, seed, self.facts))
            if isinstance(request, CompletionRequest) and request.echo:
                echoes.append(self._echo(request, text, ids))
        return Prepared(
            request=request,
            prompts=tuple(prompts),
            sampling=tuple(sampling),
            text=request.text_params(self.facts),
            stop_strings=request.stop_token_strings(self.facts),
            echoes=tuple(echoes),
        )

    def _ids(
        self, request: ChatRequest | CompletionRequest, text: str | tuple[int, ...], param: str, capacity_tokens: int
    ) -> list[int] | tuple[int, ...]:
        """Token ids of one prompt, its right end if the client asked for that."""
        ids = text if isinstance(text, tuple) else self._encode(text, request.add_special_tokens, param)
        if request.truncate_prompt_tokens is not None:
            kept = kept_prompt_tokens(
                request.truncate_prompt_tokens,
                request.token_limit,
                max_model_len=self.facts.max_model_len,
                capacity_tokens=capacity_tokens,
            )
            ids = ids[-kept:]
        if len(ids) > self._config.max_prompt_tokens:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self.facts.max_model_len} tokens, and this server takes prompts of at most "
                f"{self._config.max_prompt_tokens}. Your {param} has {len(ids)} tokens; shorten it",
                param=param,
            )
        return ids

    def _echo(self, request: CompletionRequest, text: str | tuple[int, ...], ids: Sequence[int]) -> Echo:
        whole = isinstance(text, str) and request.truncate_prompt_tokens is None
        return echo_of(
            self._text.tokenizer,
            ids,
            text if isinstance(text, str) and whole else None,
            skip_special_tokens=request.skip_special_tokens,
            with_offsets=request.num_logprobs >= 0,
        )

    def _tokenized(
        self, request: TokenizeText | TokenizeChat, texts: Sequence[str | tuple[int, ...]], param: str
    ) -> Answered:
        ids = [self._encode(text, request.add_special_tokens, param) for text in texts if isinstance(text, str)]
        strings = None
        if request.return_token_strs:
            strings = [[self._token_text(token_id) for token_id in tokens] for tokens in ids]
        many = isinstance(request, TokenizeText) and request.many
        body = tokenize_body(ids, strings, many=many, max_model_len=self.facts.max_model_len)
        return Answered(msgspec.json.encode(body), request.ignored_fields)

    def _token_text(self, token_id: int) -> str:
        return self._text.tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def _detokenized(self, data: bytes) -> Answered:
        request = parse_detokenize(parse_json(data), self._config, self.facts)
        texts = [
            self._text.tokenizer.decode(ids, skip_special_tokens=request.skip_special_tokens)
            for ids in request.sequences
        ]
        return Answered(msgspec.json.encode(detokenize_body(texts, many=request.many)), request.ignored_fields)

    def _encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        ids = self._text.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if ids and max(ids) >= self.facts.vocab_size:
            raise InvalidRequest(
                f"{param} holds text of a special token that this model has no row for (id {max(ids)}, the model ends at "
                f"{self.facts.vocab_size - 1}); leave it out",
                code="invalid_token_id",
                param=param,
            )
        return ids


def _busy() -> QueueFull:
    return QueueFull("too many large requests are being read and tokenized; try again later", retry_after_s=1.0)


def request_facts(config: ServeConfig, text: TextModel, facts: ModelFacts) -> RequestFacts:
    """What request checks need of model and tokenizer together."""
    tokenizer = text.tokenizer
    eos = [*facts.eos_token_ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])]
    return RequestFacts(
        model_name=config.model_name,
        vocab_size=facts.vocab_size,
        num_token_ids=len(tokenizer),
        max_model_len=config.max_model_len or facts.max_position_embeddings,
        eos_token_ids=tuple(dict.fromkeys(token_id for token_id in eos if token_id < facts.vocab_size)),
        generation=facts.generation,
        special_token_ids={
            tokenizer.decode([token_id], skip_special_tokens=False): token_id
            for token_id in tokenizer.special_ids
            if token_id < facts.vocab_size
        },
    )


def render_chat(request: ChatRequest, text: TextModel) -> str:
    """The text of a chat's prompt. Raises InvalidRequest `chat_template_error`."""
    template = text.template
    if request.chat_template is not None:
        try:
            template = ChatTemplate(request.chat_template, text.tokenizer.special_tokens)
        except ModelLoadError as error:
            raise InvalidRequest(error.message, code="chat_template_error", param="chat_template") from None
    if template is None:
        raise InvalidRequest(
            "this model has no chat template; use /v1/completions, or set chat_template in the server's configuration",
            code="chat_template_error",
            param="messages",
        )
    # The template knows by itself what to do with a developer's message.
    return template.render(
        request.template_messages(keep_parts=template.iterates_parts, developer_role=True),
        add_generation_prompt=request.generation_prompt,
        continue_final_message=request.continue_final_message,
        variables=request.template_kwargs(),
    )
