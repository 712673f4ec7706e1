"""The event stream response alone, over hand-made ASGI callables: it closes its request however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from starlette.types import Message

from deployments.asgi import ClientGone, EventStream, until


async def never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def gone() -> Message:
    return {"type": "http.disconnect"}


async def endless() -> AsyncGenerator[bytes, None]:
    while True:
        yield b"data: x\n\n"
        await asyncio.sleep(0)


async def run(events: AsyncGenerator[bytes, None], receive: object, send: object) -> int:
    """Number of times it was closed."""
    closed = []
    stream = EventStream(events, lambda: closed.append(1), stall_s=0.05)
    try:
        await stream({"type": "http"}, receive, send)  # type: ignore[arg-type]
    finally:
        assert len(closed) == 1
    return len(closed)


def test_client_that_takes_nothing_is_given_up_after_stall_s() -> None:
    async def stuck(message: Message) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    assert asyncio.run(asyncio.wait_for(run(endless(), never, stuck), 5)) == 1


def test_client_that_leaves_ends_the_stream_and_its_source() -> None:
    ended = []

    async def source() -> AsyncGenerator[bytes, None]:
        try:
            async for data in endless():
                yield data
        finally:
            ended.append(1)

    async def take(message: Message) -> None:
        await asyncio.sleep(0)

    async def leave_later() -> Message:
        await asyncio.sleep(0.01)
        return await gone()

    assert asyncio.run(asyncio.wait_for(run(source(), leave_later, take), 5)) == 1
    assert ended == [1]


def test_stream_that_breaks_is_closed_and_the_error_is_not_hidden() -> None:
    async def broken() -> AsyncGenerator[bytes, None]:
        yield b"data: x\n\n"
        raise RuntimeError("bug")

    async def take(message: Message) -> None:
        return None

    with pytest.raises(RuntimeError, match="bug"):
        asyncio.run(run(broken(), never, take))


def test_cancelled_stream_is_closed() -> None:
    """Ray Serve cancels the handler when the client leaves."""

    async def cancelled() -> None:
        async def take(message: Message) -> None:
            return None

        task = asyncio.create_task(run(endless(), never, take))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())


def test_work_is_cancelled_when_the_client_leaves_and_wins_a_draw() -> None:
    async def check() -> None:
        stopped = []

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                stopped.append(1)

        async def leave() -> None:
            return None

        with pytest.raises(ClientGone):
            await until(work(), leave())
        assert stopped == [1]

        async def quick() -> int:
            return 5

        assert await until(quick(), leave()) == 5

    asyncio.run(check())
