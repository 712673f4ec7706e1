"""`Orders`: what an administrator wants of one scheduler's loop, over the mailboxes of its control plane.

    send(action) -> LoopOrder --zmq--> loop, between two steps --LoopAnswer--> answered()

Knows neither sockets nor HTTP. All on one event loop.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Literal

from overlap_serve.errors import ServerUnavailable
from overlap_serve.messages import LoopAnswer, LoopOrder, Message

TIMEOUT_S = 4.0  # below what an ingress waits for a replica, so that it hears the reason


class Orders:
    """deliver: sends to the loop; False when it takes nothing."""

    def __init__(self, deliver: Callable[[list[Message]], bool]) -> None:
        self._deliver = deliver
        self._open: dict[str, asyncio.Future[LoopAnswer]] = {}

    async def send(self, action: Literal["flush", "pause", "resume"], *, force: bool = False) -> LoopAnswer:
        """Raises ServerUnavailable when the loop does not answer; it may still obey later."""
        order = LoopOrder(uuid.uuid4().hex, action, force)
        answer = self._open[order.id] = asyncio.get_running_loop().create_future()
        try:
            if not self._deliver([order]):
                raise ServerUnavailable("the scheduler takes no messages; try again")
            return await asyncio.wait_for(answer, TIMEOUT_S)
        except asyncio.TimeoutError:
            raise ServerUnavailable("the scheduler does not answer; try again") from None
        finally:
            del self._open[order.id]

    def answered(self, answer: LoopAnswer) -> None:
        """One has come; nobody waits any more for a late one."""
        waiting = self._open.get(answer.id)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)
