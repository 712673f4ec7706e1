"""zmq mailboxes: `Inbox` (PULL, bound) and `Outbox` (PUSH, one per peer endpoint). msgpack only; a send never blocks the loop.

A payload is one multipart message: [application key, msgpack of a list of `Message`]. A wrong key, an oversized or a malformed
payload is refused, and counted but for the oversized one, which libzmq drops with its connection: nothing that arrives from the
network may raise in the loop.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
import zmq

from overlap_serve.errors import OverlapServeError
from overlap_serve.messages import Message, decode, encode

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
SEND_HWM = 100_000  # messages; one message per step and peer, so this is minutes of a stalled peer
# Plain ints: arithmetic with zmq's enums costs microseconds, and these are used in every step.
NOBLOCK, SNDMORE, POLLIN = int(zmq.NOBLOCK), int(zmq.SNDMORE), int(zmq.POLLIN)
Count = Callable[[str, int], None]


def _ignore(hop: str, count: int) -> None:
    return None


def _ignore_one() -> None:
    return None


class Receiver(Protocol):
    """What a loop needs of an inbox."""

    def drain(self, timeout_s: float | None = 0.0) -> list[Message]: ...


class Sender(Protocol):
    """What a loop needs of an outbox."""

    def send(self, endpoint: str, messages: list[Message]) -> bool: ...


class Inbox:
    """Receives messages; owned by one thread.

    address: "tcp://IP" binds a free port there; "ipc://..." and "inproc://..." bind as given. `endpoint` is what peers connect to.
    refused: called for each payload that is.
    """

    def __init__(
        self,
        address: str,
        key: bytes,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        *,
        refused: Callable[[], None] = _ignore_one,
    ) -> None:
        self._key = key
        self._refused = refused
        self._socket = (context or zmq.Context.instance()).socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, SEND_HWM)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        try:
            if address.startswith("tcp://") and address.count(":") == 1:
                self.endpoint = f"{address}:{self._socket.bind_to_random_port(address)}"
            else:
                self._socket.bind(address)
                self.endpoint = address
        except zmq.ZMQError:
            self._socket.close()
            raise
        self.num_refused = 0

    def fileno(self) -> int:
        """Edge-triggered descriptor for `loop.add_reader`: after it fires, call `drain` until it returns nothing."""
        return int(self._socket.getsockopt(zmq.FD))

    def drain(self, timeout_s: float | None = 0.0) -> list[Message]:
        """All that has arrived. Waits up to timeout_s for the first (None: for ever)."""
        if timeout_s != 0.0:
            self._socket.poll(None if timeout_s is None else max(1, round(timeout_s * 1e3)))
        messages: list[Message] = []
        # Asked first: most drains of a busy loop find nothing, and the exception that says so is slow.
        while int(self._socket.getsockopt(zmq.EVENTS)) & POLLIN:
            try:
                frames = self._socket.recv_multipart(NOBLOCK)
            except zmq.Again:
                break
            messages.extend(self._open(frames))
        return messages

    def close(self) -> None:
        self._socket.close()

    def _open(self, frames: list[bytes]) -> list[Message]:
        if len(frames) == 2 and hmac.compare_digest(frames[0], self._key):
            try:
                return decode(frames[1])
            except (msgspec.MsgspecError, OverlapServeError) as error:
                reason = str(error)
        else:
            reason = "wrong application key"
        self.num_refused += 1
        self._refused()
        log.warning("refused a message on %s: %s", self.endpoint, reason)
        return []


class Outbox:
    """Sends messages to any number of endpoints; owned by one thread. Sockets are made on first use and kept until `close`.

    idle_s: a peer not written to for this long is disconnected (replicas come and go; endpoints are never reused).
    """

    def __init__(
        self,
        key: bytes,
        hop: str,
        *,
        sent: Count = _ignore,
        dropped: Count = _ignore,
        idle_s: float = 600.0,
        send_hwm: int = SEND_HWM,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self._key = key
        self._hop = hop
        self._sent = sent
        self._dropped = dropped
        self._idle_s = idle_s
        self._send_hwm = send_hwm
        self._context = context or zmq.Context.instance()
        self._sockets: dict[str, tuple[zmq.Socket[bytes], float]] = {}
        self._dropping: set[str] = set()

    def send(self, endpoint: str, messages: list[Message]) -> bool:
        """One payload for one peer. False when its queue is full or it is no address: the messages are dropped and counted."""
        try:
            socket = self._sockets[endpoint][0] if endpoint in self._sockets else self._connect(endpoint)
            self._sockets[endpoint] = (socket, time.monotonic())
            payload = encode(messages)
            socket.send(self._key, NOBLOCK | SNDMORE)
            socket.send(payload, NOBLOCK)  # goes wherever the first frame went, or both fail there
        except zmq.ZMQError as error:  # queue full (Again), or an endpoint that cannot be
            self._dropped(self._hop, len(messages))
            if endpoint not in self._dropping:  # one line when it begins, not one a step
                self._dropping.add(endpoint)
                log.warning("%s to %s: %s; dropping messages", self._hop, endpoint, error)
            return False
        self._dropping.discard(endpoint)
        self._sent(self._hop, 1)
        return True

    def close(self) -> None:
        for socket, _ in self._sockets.values():
            socket.close()
        self._sockets.clear()

    def _connect(self, endpoint: str) -> zmq.Socket[bytes]:
        self._forget_idle()
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 1000)  # ms; terminal outputs sent at shutdown still leave
        socket.setsockopt(zmq.SNDHWM, self._send_hwm)
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30_000)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError:
            socket.close()
            raise
        return socket

    def _forget_idle(self) -> None:
        horizon = time.monotonic() - self._idle_s
        for endpoint in [e for e, (_, used) in self._sockets.items() if used < horizon]:
            self._sockets.pop(endpoint)[0].close()
            self._dropping.discard(endpoint)
