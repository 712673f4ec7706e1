"""What of OpenAI's API a load needs: the body of a turn, and token counts and answers in what came back. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from overlap_serve.bench.client import Reply
from overlap_serve.bench.workload import Turn, as_text


@dataclass(frozen=True)
class Api:
    """chat: /chat/completions, else /completions. ids: send prompts of token ids as such (completions only), else as words.

    extra: more fields of every body; they win.
    """

    model: str
    chat: bool = False
    ids: bool = True
    ignore_eos: bool = True
    extra: Mapping[str, object] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return "/chat/completions" if self.chat else "/completions"


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


class Dialogue:
    """A session's history, from the first turn to the last: what the server was sent and what it said."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._ids: list[int] = []
        self._text = ""
        self._messages: list[dict[str, object]] = []

    def body(self, turn: Turn, more: bool) -> bytes:
        """Take the turn into the history; the request that asks for its answer. more: the answer will be needed by a later turn."""
        api = self._api
        fields: dict[str, object] = {
            "model": api.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "max_tokens": turn.output_tokens,
        }
        if api.ignore_eos:
            fields["ignore_eos"] = True
        if api.chat:
            fields["messages"] = self._chat(turn)
        elif turn.ids and api.ids:
            self._ids += turn.ids
            fields["prompt"] = self._ids
            if more:
                fields["return_token_ids"] = True
        else:
            self._text += (" " if self._text else "") + _words(turn)
            fields["prompt"] = self._text
        return msgspec.json.encode({**fields, **api.extra})

    def hear(self, reply: Reply) -> None:
        """Take the answer into the history. A server that gives no token ids for id prompts leaves it as it is."""
        chunks = [msgspec.json.decode(payload, type=_Chunk) for payload in reply.payloads]
        choices = [choice for chunk in chunks for choice in chunk.choices]
        answer = "".join(_said(choice) for choice in choices)
        self._ids += [token for choice in choices for token in choice.token_ids or ()]
        self._text += answer
        self._messages.append({"role": "assistant", "content": answer})

    def _chat(self, turn: Turn) -> Sequence[Mapping[str, object]]:
        if turn.messages is not None:
            self._messages += turn.messages
        else:
            self._messages.append({"role": "user", "content": _words(turn)})
        return self._messages


def count_tokens(reply: Reply, turn: Turn) -> tuple[int, int]:
    """(input, output) tokens: the server's usage, else ids that were sent and chunks that came."""
    usage = None
    if reply.usage:
        usage = msgspec.json.decode(reply.usage, type=_Chunk).usage
    prompt = usage.prompt_tokens if usage is not None else None
    completion = usage.completion_tokens if usage is not None else None
    return (
        len(turn.ids) if prompt is None else prompt,
        completion or len(reply.chunks_s),
    )


def _words(turn: Turn) -> str:
    return as_text(turn.ids) if turn.text is None else turn.text


def _said(choice: _Choice) -> str:
    return choice.text or (choice.delta.content if choice.delta is not None else None) or ""
