"""Streamed answers: deltas of choices -> ready bytes of server-sent events (http-api sections 4 and 8).

Owns the order of chunks and where `usage` and token ids appear; knows no socket and no clock. The one idea: all of a chunk but
its text is the same for the whole request, so it is encoded once, and a delta costs one JSON string and a few joins.

    begin()      -> [chunk with the echoed prompt]               once per index, text completions only, before its first delta
    delta(first) -> [role chunk, chat only] [content chunk]      once per index
    delta(...)   -> [content chunk]                              none if it adds nothing
    delta(last)  -> [content chunk] finish chunk                 once per index
    finish()     -> [usage chunk] [DONE]                         once per request;  error() -> error event, [DONE] instead
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from overlap_serve.errors import RequestError
from overlap_serve.openai.response import NO_STRINGS, AnswerHead, Usage, client_stop_reason, usage_body
from overlap_serve.sampling import FinishReason

PING = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

# ASCII output on purpose: line readers of common clients also break lines at U+0085, U+2028 and U+2029.
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def _json(value: object) -> bytes:
    return _encode(value).encode("ascii")


def _logprobs(value: Mapping[str, object] | None) -> bytes:
    """What follows the text of a chunk that does not end its choice."""
    return b',"logprobs":' + _json(value) + b',"finish_reason":null'


class _Chunks(ABC):
    """Chunks of one request. Subclasses say what a delta looks like; `_text_open` + JSON string + `_text_close` is its text."""

    _kind: str
    _text_open: bytes
    _text_close: bytes
    _no_text: bytes

    def __init__(
        self,
        head: AnswerHead,
        *,
        include_usage: bool = False,
        continuous_usage: bool = False,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        n: int = 1,
        stop_strings: Mapping[int, str] = NO_STRINGS,
    ) -> None:
        """prompt_token_ids: of each prompt, given exactly with `return_token_ids`. Choice j of prompt i has the index i * n + j.

        stop_strings: `request.stop_token_strings(facts)`. The rest as in the request.
        """
        self._head = b"data: " + _json(head.fields(self._kind))[:-1]
        self._include_usage = include_usage
        self._continuous = include_usage and continuous_usage
        self._prompt_token_ids = prompt_token_ids
        self._n = n
        self._stop_strings = stop_strings
        self._end = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._after_text = self._text_close + _logprobs(None)
        self._opens: dict[int, bytes] = {}  # of started choices: a content chunk up to its text
        self._finished: set[int] = set()

    def delta(
        self,
        index: int,
        text: str,
        token_ids: Sequence[int],
        finish: FinishReason | None = None,
        stop_reason: str | int | None = None,
        usage: Usage | None = None,
        logprobs: Mapping[str, object] | None = None,
    ) -> bytes:
        """Events of one delta of choice `index`, in order; b"" if it has nothing to say.

        finish, stop_reason: as in `TextDelta`; an `error` ends the stream by `error()` instead. usage: running totals of the
        request, required with continuous usage. logprobs: of token_ids, ready for JSON; given exactly when the request asks.
        """
        assert index not in self._finished, f"choice {index} has ended"
        end = self._end_with(usage)
        events = []
        if index not in self._opens:
            events.append(self._start(index, end))
            self._open(index)
        with_ids = self._prompt_token_ids is not None
        # A token without text yet says nothing, unless its id, its logprob or running totals are wanted (vLLM #13087).
        if text or (token_ids and (with_ids or self._continuous or logprobs is not None)):
            ids = b',"token_ids":' + _json(list(token_ids)) if with_ids else b""
            after = self._after_text if logprobs is None else self._text_close + _logprobs(logprobs)
            events.append(b"".join((self._opens[index], _json(text), after, ids, b"}", end)))
        if finish is not None:
            events.append(self._last(index, finish, stop_reason, end))
        return b"".join(events)

    def finish(self, usage: Usage) -> bytes:
        """The end of a stream that did not fail: the usage chunk, if the client asked for it, and the last event."""
        if not self._include_usage:
            return DONE
        return self._head + b',"choices":[],"usage":' + _json(usage_body(usage)) + b"}\n\n" + DONE

    def error(self, error: RequestError) -> bytes:
        """The end of a stream that failed: no finish chunk and no usage, but the envelope and the last event."""
        return b"data: " + _json(error.envelope()) + b"\n\n" + DONE

    @abstractmethod
    def _start(self, index: int, end: bytes) -> bytes:
        """Events before the first text of a choice."""

    def _open(self, index: int) -> None:
        self._opens[index] = self._choice(index) + self._text_open

    def _choice(self, index: int) -> bytes:
        return self._head + b',"choices":[{"index":' + str(index).encode("ascii") + b","

    def _last(self, index: int, finish: FinishReason, stop_reason: str | int | None, end: bytes) -> bytes:
        assert finish != "error", "a failed stream ends with error()"
        self._finished.add(index)
        reason = client_stop_reason(finish, stop_reason, self._stop_strings)
        ending = b',"logprobs":null,"finish_reason":' + _json(finish) + b',"stop_reason":' + _json(reason)
        return self._choice(index) + self._no_text + ending + b"}" + end

    def _end_with(self, usage: Usage | None) -> bytes:
        if not self._continuous:
            return self._end
        assert usage is not None, "continuous usage needs the running totals"
        return b'],"usage":' + _json(usage_body(usage)) + b"}\n\n"


class ChatChunks(_Chunks):
    """`chat.completion.chunk` events. Prompt ids are sent once, in the first chunk."""

    _kind = "chat.completion.chunk"
    _text_open = b'"delta":{"content":'
    _text_close = b"}"
    _no_text = b'"delta":{}'

    def _start(self, index: int, end: bytes) -> bytes:
        if self._prompt_token_ids is not None and not self._opens:
            end = b'],"prompt_token_ids":' + _json(list(self._prompt_token_ids[0])) + end[1:]
        role = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return self._choice(index) + role + end


class CompletionChunks(_Chunks):
    """`text_completion` events. Prompt ids and echo are sent in a first chunk of each choice; without them there is no such chunk."""

    _kind = "text_completion"
    _text_open = b'"text":'
    _text_close = b""
    _no_text = b'"text":""'

    def begin(
        self, index: int, text: str, logprobs: Mapping[str, object] | None = None, usage: Usage | None = None
    ) -> bytes:
        """The first event of a choice with echo. text: its prompt; logprobs: of the prompt's tokens; usage: as in `delta`."""
        assert index not in self._opens, f"choice {index} has begun"
        self._open(index)
        return self._first(index, text, logprobs, self._end_with(usage))

    def _start(self, index: int, end: bytes) -> bytes:
        return b"" if self._prompt_token_ids is None else self._first(index, "", None, end)

    def _first(self, index: int, text: str, logprobs: Mapping[str, object] | None, end: bytes) -> bytes:
        ids = b""
        if self._prompt_token_ids is not None:
            ids = b',"prompt_token_ids":' + _json(list(self._prompt_token_ids[index // self._n]))
        return b"".join((self._choice(index), self._text_open, _json(text), _logprobs(logprobs), ids, b"}", end))
