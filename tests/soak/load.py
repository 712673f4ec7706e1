"""A bare asyncio client that sends very many short requests: it shares few cores with the server, and holds nothing itself."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from tests.ray.conftest import completion_call

LEAVE_EVERY = 5  # 20 % of the clients leave before the end
LONG = 2000  # tokens that those have asked for
LINES = 12  # of the stream's body; half of them read so many, the others leave before anything came
STALL_S = 30.0  # nothing takes so long on the fake engine, however busy the cores are
LOOK_S = 1.0

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def send(url: str, model: str, numbers: range, num_clients: int) -> Counter[str]:
    """One request for each number. Their ends: "left", or the status code.

    Raises AssertionError when clients have waited longer than STALL_S, and says for what. All connections are closed at the end.
    """
    ends: Counter[str] = Counter()
    todo = iter(numbers)  # shared by all clients
    clients = [_Client(url, model, ends) for _ in range(num_clients)]
    tasks = [asyncio.create_task(client.run(todo)) for client in clients]
    pending = set(tasks)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, timeout=LOOK_S, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            stalled = Counter(client.waits_for for client in clients if client.has_stalled())
            assert not stalled, f"waited {STALL_S:.0f} s for {dict(stalled)}; ends so far: {dict(ends)}"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return ends


class _Client:
    """Sends one request after the other. waits_for: what of the server's, since when."""

    def __init__(self, url: str, model: str, ends: Counter[str]) -> None:
        self._url = url
        self._model = model
        self._ends = ends
        self.waits_for = ""
        self._since_s = time.monotonic()

    def has_stalled(self) -> bool:
        return bool(self.waits_for) and time.monotonic() - self._since_s > STALL_S

    async def run(self, todo: Iterator[int]) -> None:
        number: int | None = next(todo, None)
        while number is not None:  # once more for each connection that the server closed
            async with _connected(self._url) as kept:
                number = await self._use(kept, number, todo)
        self._wait_for("")

    async def _use(self, kept: Connection, number: int | None, todo: Iterator[int]) -> int | None:
        """Send on one kept connection. The number that must be sent again on another; None when all is done."""
        while number is not None:
            if number % LEAVE_EVERY == 0:
                end = await self._leave(number)
            else:
                try:
                    end = await self._whole(kept, number)
                except asyncio.IncompleteReadError as error:
                    # A server may close a kept connection between two requests; every client sends again then.
                    assert not error.partial, error.partial
                    self._ends["reconnected"] += 1
                    return number
            self._ends[end] += 1
            number = next(todo, None)
        return None

    async def _whole(self, kept: Connection, number: int) -> str:
        """Send on a kept connection, read the answer, return its status code."""
        reader, writer = kept
        body = {"prompt": f"request {number}", "max_tokens": 1 + number % 8, "ignore_eos": True}
        writer.write(completion_call({"model": self._model, **body}))
        self._wait_for("the head of an answer")
        status, length = await _head(reader)
        self._wait_for("the body of an answer")
        await reader.readexactly(length)
        return status

    async def _leave(self, number: int) -> str:
        """Close the connection before anything came (half of the time), or after some events. "left", or why there were none."""
        self._wait_for("a connection")
        async with _connected(self._url) as (reader, writer):
            body = {"prompt": f"leaving {number}", "max_tokens": LONG, "ignore_eos": True, "stream": True}
            writer.write(completion_call({"model": self._model, **body}))
            await writer.drain()
            if number // LEAVE_EVERY % 2 == 0:
                return "left"
            self._wait_for("the head of a stream")
            status, _ = await _head(reader)
            if status != "200":
                return status
            for line in range(LINES):
                self._wait_for(f"line {line} of a stream")
                if not await reader.readline():
                    return f"closed at line {line}"
        return "left"

    def _wait_for(self, what: str) -> None:
        self.waits_for = what
        self._since_s = time.monotonic()


async def _head(reader: asyncio.StreamReader) -> tuple[str, int]:
    """Status code and content length of an answer; 0 for a stream's, which has none."""
    first, *fields = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
    lengths = [field.split(":")[1] for field in fields if field.startswith("content-length:")]
    return first.split(" ")[1], int(lengths[0]) if lengths else 0


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[Connection]:
    address = urlsplit(url)
    assert address.hostname is not None and address.port is not None
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        await asyncio.wait([asyncio.ensure_future(writer.wait_closed())])  # may raise: the server was still sending
