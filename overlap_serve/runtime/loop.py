"""`OverlapLoop`: the whole overlap scheduler. While the device computes step N+1, the host processes the results of step N.

One round: receive -> plan -> launch -> process the step launched before. `depth` is how many steps may be in flight when the
next is launched: 0 is the serial loop, 1 the overlap loop; nothing else differs. The pipeline is a value passed round, and
`PendingStep.result()` is the only place where the host waits for the device.

Grammar masks, when they come, go between the two launches: forward of N, process N-1 (advances the grammars), sample N.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque

from overlap_serve.engine.base import Engine, PendingStep
from overlap_serve.messages import AbortRequest, Failure, GenerateRequest, LoopAnswer, LoopOrder, Message, Stop
from overlap_serve.runtime.meter import LoopMeter
from overlap_serve.scheduler.limits import INFINITY
from overlap_serve.scheduler.outputs import Outputs
from overlap_serve.scheduler.scheduler import Scheduler
from overlap_serve.transport import Receiver, Sender

log = logging.getLogger(__name__)

MAX_BLOCK_S = 3600.0


class OverlapLoop:
    """Connects one scheduler with one engine. control: endpoint that is told which requests ended, and gets the
    answers to orders ("" for none).

    depth: may be changed while nothing is in flight, up to what the engine's ring holds (benchmarks compare the two).
    """

    def __init__(
        self,
        scheduler: Scheduler,
        engine: Engine,
        inbox: Receiver,
        outbox: Sender,
        meter: LoopMeter,
        *,
        depth: int,
        control: str = "",
    ) -> None:
        self._scheduler = scheduler
        self._engine = engine
        self._inbox = inbox
        self._outbox = outbox
        self._meter = meter
        self.depth = depth
        self._control = control
        self._clock = meter.clock
        self._drain_until = INFINITY

    def run(self) -> None:
        """Until a Stop has been obeyed. An error ends every open request with a terminal output before it is raised."""
        inflight: deque[PendingStep] = deque()
        blocked = True
        self._meter.start(self._scheduler)
        try:
            while not (self._scheduler.draining and self._scheduler.at_rest):
                blocked = self.round(inflight, blocked)
        except BaseException as error:
            failure = Failure("engine_failed", f"the engine failed: {type(error).__name__}", 503)
            self._send(self._scheduler.fail_all(failure, self._clock()))
            raise

    def round(self, inflight: deque[PendingStep], blocked: bool) -> bool:
        """One round. Returns whether nothing can run before a message or a deadline; that is the next round's `blocked`."""
        self._receive(inflight, blocked)
        begin = self._clock()
        plan = self._scheduler.plan(begin)
        planned = self._clock()
        if plan is not None:
            self._engine.launch_forward(plan)
            inflight.append(self._engine.launch_sample())
        launched = self._clock()
        waited_s = 0.0
        blocked = plan is None and not inflight
        while inflight and (len(inflight) > self.depth or plan is None):
            waited_s += self._process(inflight.popleft())
        if blocked and self._scheduler.at_rest:
            self._check_at_rest()
        self._meter.round(self._scheduler, plan, blocked, (begin, planned, launched, self._clock()), waited_s)
        return blocked

    def _check_at_rest(self) -> None:
        """Invariant 5 each time the loop goes idle (a few sums). A mismatch is our bug: said, counted and repaired, not fatal."""
        try:
            self._scheduler.check_accounting()
        except AssertionError as error:
            log.error("KV pages do not add up at rest: %s; the prefix cache is dropped and counting starts anew", error)
            self._scheduler.repair()

    def _receive(self, inflight: deque[PendingStep], blocked: bool) -> None:
        """Take what has arrived; wait for it only if nothing can run. Never spins: waits until the nearest deadline."""
        timeout_s = 0.0
        if blocked:
            until = min(self._scheduler.next_deadline, self._drain_until)
            timeout_s = min(MAX_BLOCK_S, max(0.0, until - self._clock()))
        messages = self._inbox.drain(timeout_s)
        if blocked:
            self._meter.received()
        for message in messages:
            self._handle(message, inflight)
        now = self._clock()
        if now >= self._scheduler.next_deadline:
            self._send(self._scheduler.expire(now))
        if now >= self._drain_until:
            self._drain_until = INFINITY
            self._send(self._scheduler.abort_all("shutdown", now))

    def _handle(self, message: Message, inflight: deque[PendingStep]) -> None:
        now = self._clock()
        if isinstance(message, GenerateRequest | AbortRequest):
            self._send(self._scheduler.handle(message, now))
        elif isinstance(message, Stop):
            self._scheduler.draining = True
            self._drain_until = min(self._drain_until, now + message.drain_s)
        elif isinstance(message, LoopOrder):
            answer = self._flush(message, inflight) if message.action == "flush" else self._pause(message)
            self._outbox.send(self._control, [answer])

    def _pause(self, order: LoopOrder) -> LoopAnswer:
        """Or resume."""
        self._scheduler.paused = self._meter.progress.paused = order.action == "pause"
        return LoopAnswer(order.id)

    def _flush(self, order: LoopOrder, inflight: deque[PendingStep]) -> LoopAnswer:
        """Drop the prefix cache. Rows that have ended hold pages until their last step is processed: wait for it here."""
        if self._scheduler.num_open and not order.force:
            return LoopAnswer(order.id, busy=True)
        self._send(self._scheduler.abort_all("api", self._clock()))
        while inflight:
            self._process(inflight.popleft())
        return LoopAnswer(order.id, freed_pages=self._scheduler.flush())

    def _process(self, pending: PendingStep) -> float:
        """Wait for the oldest step and hand out what it made; returns the seconds waited."""
        begin = self._clock()
        result = pending.result()
        end = self._clock()
        self._send(self._scheduler.apply(result, end))
        return end - begin

    def _send(self, outputs: Outputs) -> None:
        """One message for each detokenizer, one for the control plane."""
        by_endpoint: defaultdict[str, list[Message]] = defaultdict(list)
        for endpoint, output in outputs.tokens:
            by_endpoint[endpoint].append(output)
        for endpoint, messages in by_endpoint.items():
            self._outbox.send(endpoint, messages)
        if outputs.ended and self._control:
            ended: list[Message] = [*outputs.ended]
            self._outbox.send(self._control, ended)
