"""A small OpenAI-compatible server on an event loop: answers are functions of the request, and it remembers what it was asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


@dataclass
class Asked:
    """path, headers and body of a request; connection: which one, by order of arrival."""

    path: str
    headers: dict[str, str]
    body: dict[str, object]
    connection: int


@dataclass
class Answer:
    """close: cut the connection afterwards. hold: never end."""

    data: bytes
    close: bool = False
    hold: bool = False


@dataclass
class SseServer:
    answer: Callable[[Asked], Answer]
    asked: list[Asked] = field(default_factory=list)
    open_now: int = 0
    open_peak: int = 0
    connections: int = 0
    port: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def bodies(self) -> list[dict[str, object]]:
        return [asked.body for asked in self.asked if asked.path != "/v1/models"]

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        number, self.connections = self.connections, self.connections + 1
        try:
            while await self._one(number, reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _one(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        body = await reader.readexactly(int(headers["content-length"]))
        asked = Asked(first.split(" ")[1], headers, json.loads(body or b"{}"), number)
        self.asked.append(asked)
        self.open_now += 1
        self.open_peak = max(self.open_peak, self.open_now)
        answer = models() if asked.path == "/v1/models" else self.answer(asked)
        writer.write(answer.data)
        await writer.drain()
        if answer.hold:
            await reader.read()
        # Others get their turn while this request is open.
        await asyncio.sleep(0)
        self.open_now -= 1
        return not answer.close and not answer.hold


@asynccontextmanager
async def sse_server(answer: Callable[[Asked], Answer]) -> AsyncIterator[SseServer]:
    """Clients must be closed before it is left: it waits for the end of their connections."""
    server = SseServer(answer)
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()
        await asyncio.gather(*server.tasks)


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(fields: object) -> bytes:
    return chunk(b"data: " + json.dumps(fields).encode() + b"\n\n")


def prompt_tokens(body: dict[str, object]) -> int:
    """Token ids as they are, else words."""
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        return len(prompt)
    if isinstance(prompt, str):
        return len(prompt.split())
    messages = body["messages"]
    assert isinstance(messages, list)
    return sum(len(message["content"].split()) for message in messages)


def tokens(asked: Asked) -> bytes:
    """One event per token asked for; text, or delta, or also ids, as asked."""
    count = asked.body["max_tokens"]
    assert isinstance(count, int)
    events = []
    for index in range(count):
        choice: dict[str, object] = {"index": 0, "finish_reason": None}
        choice |= {"delta": {"content": f" a{index}"}} if "messages" in asked.body else {"text": f" a{index}"}
        if asked.body.get("return_token_ids"):
            choice["token_ids"] = [7000 + index]
        events.append(event({"choices": [choice], "usage": None}))
    return b"".join(events)


def streamed(asked: Asked) -> Answer:
    """All tokens, usage, [DONE]."""
    count = asked.body["max_tokens"]
    usage = {"prompt_tokens": prompt_tokens(asked.body), "completion_tokens": count}
    return Answer(HEAD + tokens(asked) + event({"choices": [], "usage": usage}) + chunk(b"data: [DONE]\n\n") + END)


def models() -> Answer:
    return whole(200, {"data": [{"id": "fake"}]})


def whole(status: int, fields: object) -> Answer:
    body = json.dumps(fields).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    return Answer(head + body)
