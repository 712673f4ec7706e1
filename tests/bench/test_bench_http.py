"""Bytes to events: whatever the pieces in which a response arrives."""

from __future__ import annotations

import pytest

from overlap_serve.bench.http import EventSplitter, ProtocolError, ResponseReader

BODY = b': ping\n\ndata: {"a":1}\n\nevent: x\ndata:{"b":2}\r\n\r\ndata: [DONE]\n\n'
EVENTS = [b'{"a":1}', b'{"b":2}', b"[DONE]"]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x;name=value\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n"


RESPONSES = {
    "chunked": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(BODY, 7) + b"\r\n",
    "trailer": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(BODY, 1000) + b"X-Sum: 1\r\nY: 2\r\n\r\n",
    "length": HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY,
    "interim": b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY,
}


def read(response: bytes, size: int) -> tuple[ResponseReader, list[bytes]]:
    reader, splitter, events = ResponseReader(), EventSplitter(), []
    for start in range(0, len(response), size):
        events += splitter.feed(reader.feed(response[start : start + size]))
    return reader, events


@pytest.mark.parametrize("name", RESPONSES)
def test_any_pieces_give_the_same_events(name: str) -> None:
    for size in (*range(1, 40), 10_000):
        reader, events = read(RESPONSES[name], size)
        assert events == EVENTS
        assert (reader.status, reader.done, reader.keep_alive) == (200, True, True)


def test_the_end_comes_with_the_last_byte_and_not_before() -> None:
    for name, response in RESPONSES.items():
        reader, _ = read(response[:-1], 5)
        assert not reader.done, name


def test_without_framing_the_connection_ends_the_body() -> None:
    reader, events = read(HEAD + b"\r\n" + BODY, 11)
    assert (events, reader.done, reader.ends_with_connection) == (EVENTS, False, True)


def test_a_server_may_close_after_its_answer() -> None:
    reader, _ = read(HEAD + b"Connection: Close\r\nContent-Length: 0\r\n\r\n", 1000)
    assert not reader.keep_alive


@pytest.mark.parametrize(
    "response",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 what\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000,
    ],
)
def test_what_is_no_http_is_an_error(response: bytes) -> None:
    with pytest.raises(ProtocolError):
        read(response, 100_000)
