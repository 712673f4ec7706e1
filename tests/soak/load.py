"""A bare asyncio client that sends very many short requests: it shares few cores with the server, and holds nothing itself."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from urllib.parse import urlsplit

from tests.ray.conftest import completion_call

LEAVE_EVERY = 5  # 20 % of the clients leave before the end
LINE_S = 10.0  # a stream of the fake engine does not pause for so long
LONG = 2000  # tokens that those have asked for

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def send(url: str, model: str, numbers: range, num_clients: int) -> Counter[str]:
    """One request for each number. Their ends: "left", or the status code."""
    ends: Counter[str] = Counter()
    todo = iter(numbers)
    await asyncio.gather(*(_client(url, model, todo, ends) for _ in range(num_clients)))
    return ends


async def _client(url: str, model: str, todo: Iterator[int], ends: Counter[str]) -> None:
    kept = await _connect(url)
    for number in todo:  # shared by all clients
        if number % LEAVE_EVERY == 0:
            await _leave(url, model, number)
            ends["left"] += 1
        else:
            body = {"model": model, "prompt": f"request {number}", "max_tokens": 1 + number % 8, "ignore_eos": True}
            try:
                end = await _whole(kept, body)
            except asyncio.IncompleteReadError as error:
                # A server may close a kept connection between two requests; every client sends again then.
                assert not error.partial, error.partial
                kept[1].close()
                kept = await _connect(url)
                ends["reconnected"] += 1
                end = await _whole(kept, body)
            ends[end] += 1
    kept[1].close()
    await kept[1].wait_closed()


async def _whole(connection: Connection, body: dict[str, object]) -> str:
    """Send on a kept connection, read the answer, return its status code."""
    reader, writer = connection
    writer.write(completion_call(body))
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = next(line.split(":")[1] for line in head.split("\r\n") if line.startswith("content-length:"))
    await reader.readexactly(int(length))
    return head.split(" ", 2)[1]


async def _leave(url: str, model: str, number: int) -> None:
    """Close the connection before anything came (half of the time), or after some events."""
    reader, writer = await _connect(url)
    body = {"model": model, "prompt": f"leaving {number}", "max_tokens": LONG, "ignore_eos": True, "stream": True}
    writer.write(completion_call(body))
    await writer.drain()
    for _ in range(number // LEAVE_EVERY % 2 * 12):
        if not await asyncio.wait_for(reader.readline(), LINE_S):
            break
    writer.close()
    await asyncio.wait([asyncio.ensure_future(writer.wait_closed())])  # may raise: the server was still sending


async def _connect(url: str) -> Connection:
    address = urlsplit(url)
    assert address.hostname is not None and address.port is not None
    return await asyncio.open_connection(address.hostname, address.port)
