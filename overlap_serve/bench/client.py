"""The client: one connection per request in flight, kept open between requests, time stamps taken where bytes arrive.

`buffer_updated` reads the clock before it looks at a byte, and looks at events by bytes only: JSON is parsed when a request has ended.
benchmarks/client_error.py measures how late the stamps are. Knows nothing of loads and statistics.
"""

from __future__ import annotations

import asyncio
import ssl
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from overlap_serve.bench.http import EventSplitter, ProtocolError, ResponseReader
from overlap_serve.errors import InvalidRequest

MAX_BODY_BYTES = 1 << 20  # of an answer that is no stream
MAX_DETAIL = 300
READ_BYTES = 32 * 1024


@dataclass
class Reply:
    """What came back. chunks_s: perf_counter at each event with choices. payloads: all events, if they were to be kept.

    error: "" or one of connect, disconnected, timeout, protocol, http_STATUS, stream_error, empty (no chunk came).
    """

    start_s: float
    end_s: float = 0.0
    status: int = 0
    chunks_s: list[float] = field(default_factory=list)
    usage: bytes = b""
    body: bytes = b""
    payloads: list[bytes] = field(default_factory=list)
    error: str = ""
    detail: str = ""


class _Problem(msgspec.Struct):
    error: dict[str, object] | str | None = None
    detail: object = None


class _Exchange:
    """One request on a connection. Ends its future exactly once."""

    def __init__(self, reply: Reply, keep: bool, ended: asyncio.Future[None]) -> None:
        self.reply = reply
        self.reader = ResponseReader()
        self.ended = ended
        self._events = EventSplitter()
        self._keep = keep
        self._said_done = False

    def receive(self, now: float, data: bytes) -> None:
        """Raises ProtocolError."""
        body = self.reader.feed(data)
        if self.reader.is_stream:
            for payload in self._events.feed(body):
                self._event(now, payload)
        elif len(self.reply.body) < MAX_BODY_BYTES:
            self.reply.body += body
        if self.reader.done or (self._said_done and self.reader.ends_with_connection):
            self.end()

    def _event(self, now: float, payload: bytes) -> None:
        """A quote inside a text is escaped, so these patterns match keys only."""
        if payload == b"[DONE]":
            self._said_done = True
            return
        if b'"error":' in payload and (problem := _message(payload)):
            self.fail("stream_error", problem)
        if self._keep:
            self.reply.payloads.append(payload)
        if b'"completion_tokens"' in payload:
            self.reply.usage = payload
        if b'"choices"' in payload and b'"choices":[]' not in payload and b'"choices": []' not in payload:
            self.reply.chunks_s.append(now)

    def fail(self, error: str, detail: str) -> None:
        """The first reason counts."""
        if not self.reply.error:
            self.reply.error, self.reply.detail = error, detail[:MAX_DETAIL]

    def end(self) -> None:
        self.reply.end_s = time.perf_counter()
        self.reply.status = self.reader.status
        if self.reader.status not in (0, 200):
            self.fail(f"http_{self.reader.status}", _message(self.reply.body) or "")
        if not self.ended.done():
            self.ended.set_result(None)

    def lose(self, why: str) -> None:
        if self._said_done or self.reader.done or (self.reader.ends_with_connection and self.reply.body):
            self.end()
            return
        self.fail("disconnected", why)
        self.end()


class _Connection(asyncio.BufferedProtocol):
    """exchange: the one under way, None while idle. Buffered, as asyncio's other protocols get a new 256 KB for every read."""

    def __init__(self) -> None:
        self._buffer = bytearray(READ_BYTES)
        self.exchange: _Exchange | None = None
        self.transport: asyncio.Transport | None = None
        self.open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.open = transport, True

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        now = time.perf_counter()
        data = bytes(memoryview(self._buffer)[:nbytes])
        if self.exchange is None:
            self.close()  # bytes that nobody asked for
            return
        try:
            self.exchange.receive(now, data)
        except ProtocolError as error:
            self.exchange.fail("protocol", str(error))
            self.exchange.end()

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        if self.exchange is not None:
            self.exchange.lose(str(exc) if exc is not None else "the server closed the connection")

    def close(self) -> None:
        self.open = False
        if self.transport is not None:
            self.transport.abort()


class Client:
    """Sends requests to one server. Must be used and closed on one event loop. timeout_s: of a whole request."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float) -> None:
        """url: scheme, host, port and what all paths begin with, as http://host:8000/v1. Raises InvalidRequest."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise InvalidRequest(f"{url} is no address of a server; write http://HOST:PORT")
        self._host, self._prefix = parts.hostname, parts.path.rstrip("/")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        fields = {"Host": parts.netloc.rpartition("@")[2], "Content-Type": "application/json", **headers}
        self._fields = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._timeout_s = timeout_s
        self._idle: list[_Connection] = []

    async def post(self, path: str, body: bytes, keep: bool = False) -> Reply:
        """A streaming request; an answer without any chunk is an error. keep: keep all events. Never raises for the server's sake."""
        reply = await self._send("POST", path, body, keep)
        if not reply.error and not reply.chunks_s:
            reply.error, reply.detail = "empty", "no chunk with choices came"
        return reply

    async def get(self, path: str) -> Reply:
        return await self._send("GET", path, b"", False)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _send(self, method: str, path: str, body: bytes, keep: bool) -> Reply:
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._fields}Content-Length: {len(body)}\r\n\r\n".encode()
        start_s = time.perf_counter()
        deadline_s = start_s + self._timeout_s
        while True:
            reply = Reply(start_s)
            connection = self._take_idle()
            fresh = connection is None
            if connection is None:
                connection = await self._connect(reply, deadline_s)
            if connection is None:
                return reply
            await self._exchange(connection, reply, head + body, keep, deadline_s)
            # A kept connection may have been closed by the server meanwhile: that is no failure of this request.
            if fresh or reply.error != "disconnected" or reply.status:
                return reply

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        return None

    async def _connect(self, reply: Reply, deadline_s: float) -> _Connection | None:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await asyncio.wait_for(
                loop.create_connection(_Connection, self._host, self._port, ssl=self._tls),
                max(0.0, deadline_s - time.perf_counter()),
            )
            return connection
        except (asyncio.TimeoutError, TimeoutError):
            reply.error, reply.detail = "timeout", "no connection in time"
        except OSError as error:
            reply.error, reply.detail = "connect", str(error)[:MAX_DETAIL]
        reply.end_s = time.perf_counter()
        return None

    async def _exchange(
        self, connection: _Connection, reply: Reply, request: bytes, keep: bool, deadline_s: float
    ) -> None:
        loop = asyncio.get_running_loop()
        exchange = connection.exchange = _Exchange(reply, keep, loop.create_future())
        assert connection.transport is not None
        connection.transport.write(request)
        timer = loop.call_later(max(0.0, deadline_s - time.perf_counter()), self._expire, exchange)
        try:
            await exchange.ended
        finally:
            timer.cancel()
            connection.exchange = None
            if connection.open and exchange.reader.keep_alive and exchange.ended.done():
                self._idle.append(connection)
            else:
                connection.close()

    @staticmethod
    def _expire(exchange: _Exchange) -> None:
        exchange.fail("timeout", "the answer was not complete in time")
        exchange.end()


def _message(data: bytes) -> str:
    """The server's own words: of OpenAI's envelope, FastAPI's `detail`, or as they are. "" for an error that is null."""
    try:
        problem = msgspec.json.decode(data, type=_Problem)
    except msgspec.MsgspecError:
        return data.decode(errors="replace").strip()
    if isinstance(problem.error, dict):
        return str(problem.error.get("message") or problem.error)
    return str(problem.error or problem.detail or "")
