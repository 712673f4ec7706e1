"""HTTP/1.1 and server-sent events from bytes, no I/O: `ResponseReader` takes what a socket gave and returns body bytes, `split_events`
turns body bytes into the data of events. Nothing is copied or parsed that a time stamp does not need."""

from __future__ import annotations

MAX_HEAD_BYTES = 64 * 1024


class ProtocolError(Exception):
    """What came is not an HTTP/1.1 response."""


class ResponseReader:
    """One response. status is 0 until its head is complete; done: the body has ended by its own framing."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.done = False
        self._buffer = b""
        self._is_stream = False
        self._chunked = False
        self._left: int | None = 0  # bytes of the body, or of its current chunk; None: until the connection closes

    @property
    def ends_with_connection(self) -> bool:
        return self.status > 0 and not self._chunked and self._left is None

    @property
    def is_stream(self) -> bool:
        return self.status == 200 and self._is_stream

    @property
    def keep_alive(self) -> bool:
        return self.done and self.headers.get("connection", "").lower() != "close"

    def feed(self, data: bytes) -> bytes:
        """Body bytes in `data`. Raises ProtocolError."""
        if self.status == 0:
            data = self._head(self._buffer + data)
            if self.status == 0:
                return b""
        if self._chunked:
            return self._chunks(data)
        if self._left is None:
            return data
        body, self._left = data[: self._left], max(0, self._left - len(data))
        self.done = self._left == 0
        return body

    def _head(self, data: bytes) -> bytes:
        """What follows the head; sets status when the head is complete."""
        head, end, rest = data.partition(b"\r\n\r\n")
        if not end:
            if len(data) > MAX_HEAD_BYTES or not b"HTTP/1."[: len(data)] == data[:7]:
                raise ProtocolError("the server does not speak HTTP/1.1")
            self._buffer = data
            return b""
        self._buffer = b""
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, status = first.partition(" ")
        if not version.startswith("HTTP/1.") or not status[:3].isdigit():
            raise ProtocolError(f"the server does not speak HTTP/1.1: {first[:60]!r}")
        if status.startswith("1"):
            return self._head(rest) if rest else b""  # an interim response; the real one follows
        self.headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
        }
        self.status = int(status[:3])
        self._chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        self._is_stream = "event-stream" in self.headers.get("content-type", "")
        length = self.headers.get("content-length")
        self._left = 0 if self._chunked or self.status in (204, 304) else None
        if length is not None and not self._chunked:
            if not length.isdigit():
                raise ProtocolError(f"content-length is {length!r}")
            self._left = int(length)
        return rest

    def _chunks(self, data: bytes) -> bytes:
        """Undo the chunked coding (RFC 9112, 7.1). `_left` counts the newline after a chunk too."""
        body = []
        data = self._buffer + data
        self._buffer = b""
        while data and not self.done:
            if self._left:
                body.append(data[: max(0, self._left - 2)])
                self._left, data = max(0, self._left - len(data)), data[self._left :]
                continue
            line, newline, rest = data.partition(b"\r\n")
            if not newline:
                self._buffer = data
                break
            size = _chunk_size(line)
            if size == 0 and not self._ended(rest):
                self._buffer = data  # the trailer is not complete
                break
            self.done = size == 0
            self._left, data = size + 2 if size else 0, rest
        return b"".join(body)

    @staticmethod
    def _ended(trailer: bytes) -> bool:
        return trailer.startswith(b"\r\n") or b"\r\n\r\n" in trailer


def _chunk_size(line: bytes) -> int:
    try:
        return int(line.partition(b";")[0], 16)
    except ValueError:
        raise ProtocolError(f"a chunk's size is {line[:20]!r}") from None


class EventSplitter:
    """Data of server-sent events, one `data:` line each, as all OpenAI-compatible servers send them. Comments are dropped."""

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, body: bytes) -> list[bytes]:
        *lines, self._tail = (self._tail + body).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
