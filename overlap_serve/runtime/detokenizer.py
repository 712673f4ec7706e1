"""`DetokenizerService`: one replica of the shared detokenizer pool. Connects an inbox and an outbox to a `Detokenizer`.

Owns its sockets, its metrics and the batching: what has arrived is handled together, and every ingress gets one payload with
its deltas in order. Decides nothing about text. A bad output ends its own choice, never the service.
"""

from __future__ import annotations

import logging
import threading
import time

from prometheus_client import CollectorRegistry

from overlap_serve.messages import AbortRequest, Expect, Failure, Message, Stop, TextDelta, TokenOutput
from overlap_serve.metrics import DetokenizerMetrics, TransportMetrics, build_info, snapshot
from overlap_serve.text.detokenizer import Detokenizer
from overlap_serve.text.tokenizer import Tokenizer
from overlap_serve.transport import Inbox, Outbox

log = logging.getLogger(__name__)

IDLE_S = 3600.0  # a choice silent for one to two of these is forgotten; requests that long have met their deadline

Batch = dict[str, list[Message]]


class Expected:
    """Choices that were announced and not opened, by request. Announcement and first output come from different senders, in any
    order: so a count may go below zero for a moment."""

    def __init__(self) -> None:
        self._missing: dict[str, int] = {}
        self._idle: dict[str, int] = {}  # not touched since the last drop_idle

    def announced(self, rid: str, n: int) -> None:
        self._add(rid, n)

    def opened(self, rid: str) -> None:
        self._add(rid, -1)

    def dropped(self, rid: str) -> None:
        self._missing.pop(rid, None)
        self._idle.pop(rid, None)

    def count(self) -> int:
        return sum(n for known in (self._missing, self._idle) for n in list(known.values()) if n > 0)

    def drop_idle(self) -> None:
        """Forget requests of which nothing was heard between the last two calls: their other half is lost."""
        self._idle, self._missing = self._missing, {}

    def _add(self, rid: str, n: int) -> None:
        n += self._missing.pop(rid, 0) + self._idle.pop(rid, 0)
        if n:
            self._missing[rid] = n


class DetokenizerService:
    """endpoint: where schedulers send. All but `run` may be called from any thread."""

    def __init__(self, tokenizer: Tokenizer, bind: str, key: bytes, replica: str) -> None:
        """Binds at `bind` ("tcp://IP": a free port there, or "inproc://name"); what arrives before `run` waits."""
        self._registry = CollectorRegistry()
        build_info(self._registry, replica)
        self._metrics = DetokenizerMetrics(self._registry, replica)
        hops = TransportMetrics(self._registry, replica)
        self._detokenizer = Detokenizer(tokenizer)
        self._expected = Expected()
        self._num_late_counted = 0
        self._key = key
        self._inbox = Inbox(bind, key, refused=hops.refused)
        self._outbox = Outbox(key, "detokenizer_ingress", sent=hops.sent, dropped=hops.dropped)
        self._ended = threading.Event()
        self.endpoint = self._inbox.endpoint

    def run(self) -> None:
        """Serve until a Stop arrives, or until its drain_s has passed or no choice is open; then release the sockets."""
        stop_at: float | None = None
        idle_at = time.monotonic() + IDLE_S
        try:
            while True:
                now = time.monotonic()
                if stop_at is not None and (now >= stop_at or len(self._detokenizer) == 0):
                    return
                if now >= idle_at:
                    self._forget_idle()
                    idle_at = now + IDLE_S
                wake_at = idle_at if stop_at is None else min(idle_at, stop_at)
                drain_s = self._serve(self._inbox.drain(max(0.001, wake_at - now)))
                if drain_s is not None:
                    stop_at = time.monotonic() + drain_s
        finally:
            self._ended.set()
            self._inbox.close()
            self._outbox.close()

    def stop(self) -> None:
        """Make `run` return, after what has arrived before."""
        if self._ended.is_set():
            return
        outbox = Outbox(self._key, "detokenizer_stop")
        outbox.send(self.endpoint, [Stop()])
        outbox.close()

    def metrics_snapshot(self) -> bytes:
        """This process, in the Prometheus text format."""
        self._metrics.open_streams.set(self.open_streams())
        return snapshot(self._registry)

    def open_streams(self) -> int:
        """Choices with text state."""
        return len(self._detokenizer)

    def unfinished(self) -> int:
        """Choices with text state, and those that were announced and have had no output yet."""
        return len(self._detokenizer) + self._expected.count()

    def _serve(self, messages: list[Message]) -> float | None:
        """One batch. The drain_s of a Stop in it, else None."""
        batch: Batch = {}
        drain_s: float | None = None
        for message in messages:
            if isinstance(message, TokenOutput):
                if message.open is not None:
                    self._expected.opened(message.rid)
                self._handle(message, batch)
            elif isinstance(message, AbortRequest):
                self._detokenizer.drop(message.rid, message.choice)
                self._expected.dropped(message.rid)
            elif isinstance(message, Expect):
                self._expected.announced(message.rid, message.n)
            elif isinstance(message, Stop):
                drain_s = message.drain_s
            else:
                log.warning("ignored a %s: it is not for a detokenizer", type(message).__name__)
        for ingress, deltas in batch.items():
            self._send(ingress, deltas)
        self._metrics.late_outputs.inc(self._detokenizer.num_late - self._num_late_counted)
        self._num_late_counted = self._detokenizer.num_late
        return drain_s

    def _handle(self, output: TokenOutput, batch: Batch) -> None:
        try:
            result = self._detokenizer.handle(output)
        except Exception as error:  # the boundary between requests: one must not take the others down
            log.exception("request %s, choice %d: cannot be detokenized", output.rid, output.choice)
            failure = Failure("internal_error", f"the output could not be turned into text: {error}")
            result = self._detokenizer.fail(output, failure)
        if result is not None:
            ingress, delta = result
            batch.setdefault(ingress, []).append(delta)

    def _send(self, ingress: str, deltas: list[Message]) -> None:
        if self._outbox.send(ingress, deltas):
            return
        for delta in deltas:  # text was lost, so these streams have no right continuation
            if isinstance(delta, TextDelta):
                self._detokenizer.drop(delta.rid, delta.choice)

    def _forget_idle(self) -> None:
        self._expected.drop_idle()
        num_idle = self._detokenizer.drop_idle()
        if num_idle:
            log.warning("forgot %d choices whose scheduler and ingress have gone silent", num_idle)
