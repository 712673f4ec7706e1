"""grpc.aio goes on when more answers come than the event loop has turns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable

import pytest
from grpc import aio  # type: ignore[import-untyped]

from deployments.poller import keep_grpc_polling

NUM_CALLS = 1000  # a blocking wake-up socket is full after 278
FEW_TURNS = 20
NOBODY = "127.0.0.1:1"  # every call there is answered at once


def test_a_burst_of_answers_needs_few_turns_of_the_event_loop() -> None:
    async def refused(call: Awaitable[bytes]) -> None:
        with pytest.raises(aio.AioRpcError):
            await call

    async def scenario() -> None:
        async with aio.insecure_channel(NOBODY) as channel:
            assert keep_grpc_polling() == 2
            method = channel.unary_unary("/x/y")
            await refused(method(b""))
            answers = [asyncio.ensure_future(refused(method(b""))) for _ in range(NUM_CALLS)]
            for _ in range(FEW_TURNS):
                await asyncio.sleep(0)
                threading.Event().wait(0.05)  # the turn of a busy loop
            assert sum(not answer.done() for answer in answers) == 0
            await asyncio.gather(*answers)

    asyncio.run(scenario())


def test_sockets_of_a_closed_channel_are_passed_over() -> None:
    async def scenario() -> None:
        channel = aio.insecure_channel(NOBODY)
        before = keep_grpc_polling()
        await channel.close()
        del channel
        assert keep_grpc_polling() <= before

    asyncio.run(scenario())
