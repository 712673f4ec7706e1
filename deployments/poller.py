"""Keeps answers of Serve calls coming on a busy event loop, in spite of a flaw of grpc.aio.

A thread of grpc.aio takes events from the C core, puts them into a queue and writes one byte for each into a socket pair; the event
loop reads *one* byte a turn, then empties the queue. With more than one event a turn the unread bytes add up, 278 of them fill the
socket, and the thread blocks in `write` until the kernel finds three quarters of it free again: for some 208 turns no call is
answered and none is taken in. A loaded ingress makes 40 turns a second, so that was 5 s: the schedulers' states came too late, and
requests were refused (seen with grpcio 1.85.3 and before; a socket that cannot block loses nothing, because a full one wakes the loop).
"""

from __future__ import annotations

import gc
import logging
import socket

log = logging.getLogger(__name__)

QUEUE = "PollerCompletionQueue"  # grpc._cython.cygrpc; one in a process, from its first grpc.aio channel or server on


def keep_grpc_polling() -> int:
    """Make the wake-up sockets of this process non-blocking; returns how many there are (0: this grpcio works in another way).

    To be called in a replica's constructor: by then Serve has made its gRPC server, and has not yet frozen the garbage collector.
    """
    queues = [thing for thing in gc.get_objects() if type(thing).__name__ == QUEUE]
    parts = [part for queue in queues for part in gc.get_referents(queue)]
    # A queue that was shut down still has its sockets, closed.
    sockets = [part for part in parts if isinstance(part, socket.socket) and part.fileno() >= 0]
    for end in sockets:
        end.setblocking(False)
    log.debug("%d wake-up sockets of grpc.aio do not block any more", len(sockets))
    return len(sockets)
