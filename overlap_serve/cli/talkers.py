"""Who answers in a chat: a server by its OpenAI API, or an engine in this process. Both give the answer piece by piece.

HTTP is urllib: the package declares no client (httpx is for its tests, aiohttp is Ray's own and asynchronous), and one blocking stream
at a time, which Ctrl-C interrupts by closing it, needs no more.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

import msgspec

from overlap_serve.errors import InvalidRequest, OverlapServeError, RequestError, ServerUnavailable
from overlap_serve.llm import LLM

MAX_ERROR_BYTES = 64 * 1024

Message = Mapping[str, str]


@dataclass(frozen=True)
class Said:
    """A piece of an answer. finish: why it ended, on the last one."""

    text: str
    finish: str | None


class Talker(Protocol):
    @property
    def title(self) -> str:
        """Who that is, for people."""

    def answer(self, messages: Sequence[Message]) -> Generator[Said, None, None]:
        """The answer to a conversation; closing the iterator ends it. Raises RequestError."""

    def close(self) -> None: ...


class OfflineTalker:
    """Closes the engine with itself."""

    def __init__(self, llm: LLM, sampling: Mapping[str, object]) -> None:
        self._llm = llm
        self._sampling = sampling
        self.title = f"{llm.config.model_name}, in this process"

    def answer(self, messages: Sequence[Message]) -> Generator[Said, None, None]:
        with closing(self._llm.stream_chat(messages, self._sampling)) as pieces:
            for piece in pieces:
                yield Said(piece.text, piece.finish_reason)

    def close(self) -> None:
        self._llm.close()


class UrlTalker:
    """model None: the first that the server has, asked for once here. timeout_s: of silence.

    Raises InvalidRequest for what is no address, ServerUnavailable when nothing answers there.
    """

    def __init__(
        self, url: str, model: str | None, key: str | None, sampling: Mapping[str, object], timeout_s: float
    ) -> None:
        self._base = base_url(url)
        self._headers = {"Content-Type": "application/json"} | (
            {} if key is None else {"Authorization": f"Bearer {key}"}
        )
        self._sampling = dict(sampling)
        self._timeout_s = timeout_s
        self._model = model or self._first_model()
        self.title = f"{self._model} at {self._base}"

    def answer(self, messages: Sequence[Message]) -> Generator[Said, None, None]:
        body = {**self._sampling, "model": self._model, "messages": list(messages), "stream": True}
        with closing(self._open("/chat/completions", body)) as response:
            for event in self._events(response):
                said = _said(event)
                if said is not None:
                    yield said

    def close(self) -> None:
        return None

    def _first_model(self) -> str:
        with closing(self._open("/models", None)) as response:
            try:
                answer = msgspec.json.decode(response.read(), type=_Models)
            except msgspec.MsgspecError as error:
                raise RequestError(
                    f"{self._base}/models is no list of models: {error}; is the address right?"
                ) from None
            except (OSError, http.client.HTTPException) as error:
                raise self._lost(error) from None
        if not answer.data:
            raise RequestError(f"{self._base} has no models; name one with --model")
        return answer.data[0].id

    def _open(self, path: str, body: object | None) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, self._headers)
        try:
            response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=self._timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                raise _refusal(error) from None
        except urllib.error.URLError as error:
            raise ServerUnavailable(
                f"nothing answers at {self._base}: {error.reason}; start a server, give its address with --url, or chat without one "
                "with --model"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error) from None
        return response

    def _events(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        """Data of the event stream, to its proper end."""
        try:
            for line in response:
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:"):
                    continue  # comments, and blank lines between events
                if data == b"[DONE]":
                    return
                yield data
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error) from None
        raise ServerUnavailable(f"{self._base} closed the connection in the middle of the answer")

    def _lost(self, error: Exception) -> ServerUnavailable:
        return ServerUnavailable(f"the connection to {self._base} was lost: {error or type(error).__name__}")


def base_url(url: str) -> str:
    """http://host:8000 -> http://host:8000/v1. A path that is there is kept."""
    parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise InvalidRequest(f"{url} is no address of a server; write http://HOST:PORT")
    path = parts.path.rstrip("/") or "/v1"
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc, path, "", ""))


class _Named(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Named]


class _Delta(msgspec.Struct):
    content: str | None = None


class _ChunkChoice(msgspec.Struct):
    delta: _Delta
    finish_reason: str | None = None


class _Problem(msgspec.Struct):
    message: str


class _Event(msgspec.Struct):
    """A chunk, or an error in the middle of a stream."""

    choices: list[_ChunkChoice] = []
    error: _Problem | None = None


def _said(data: bytes) -> Said | None:
    try:
        event = msgspec.json.decode(data, type=_Event)
    except msgspec.MsgspecError as error:
        raise RequestError(f"the server sent an event that is no chunk of a chat: {error}") from None
    if event.error is not None:
        raise RequestError(event.error.message)
    if not event.choices:
        return None  # the usage chunk
    return Said(event.choices[0].delta.content or "", event.choices[0].finish_reason)


def _refusal(error: urllib.error.HTTPError) -> OverlapServeError:
    """The server's own words, where it has any."""
    body = error.read(MAX_ERROR_BYTES)
    try:
        problem = msgspec.json.decode(body, type=_Event).error
    except msgspec.MsgspecError:
        problem = None
    reason = problem.message if problem is not None else error.reason
    return RequestError(f"the server refused ({error.code}): {reason}")
