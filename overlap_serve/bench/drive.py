"""`Driver`: one engine under the server's own loop, in the calling thread, fed with requests and read by nobody.

Owns mailboxes and the order of runs: each run is a load that comes at once, and the loop works until all of it has ended. Outputs are
packed and sent over TCP as in a server, to a socket that is not read meanwhile: a reader would take the loop's core or its GIL.
"""

from __future__ import annotations

import gc
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from overlap_serve.cache.prefix import NoPrefixCache
from overlap_serve.config import EngineSpec
from overlap_serve.device.base import Span
from overlap_serve.engine.base import Engine
from overlap_serve.messages import GenerateRequest, Message, Route, Stop, pack_ids
from overlap_serve.metrics import SchedulerMetrics
from overlap_serve.runtime.loop import OverlapLoop
from overlap_serve.runtime.meter import LoopMeter
from overlap_serve.runtime.trace import CAPACITY, LoopTrace, Round
from overlap_serve.runtime.worker import scheduler_limits
from overlap_serve.sampling import SamplingParams, TextParams
from overlap_serve.scheduler.limits import Limits
from overlap_serve.scheduler.outputs import Outputs
from overlap_serve.scheduler.scheduler import Scheduler
from overlap_serve.step import StepPlan, StepResult
from overlap_serve.transport import Inbox, Outbox, Sender

KEY = b"benchmark"
DRAIN_S = 3600.0
SWITCH_INTERVAL_S = 0.0005  # as in the process of a rank (deployments.rank)
PLAN_SHARE = 0.4  # of added host work
Clock = Callable[[], float]


@dataclass(frozen=True)
class Load:
    """`rows` prompts of prompt_len tokens and up to `spread` more (so that rows do not reach the end of a page together), that decode
    side by side for `steps` steps."""

    rows: int
    prompt_len: int
    steps: int
    spread: int = 16

    @property
    def longest(self) -> int:
        return self.prompt_len + self.spread + self.steps

    def requests(self, endpoint: str, vocab_size: int) -> list[Message]:
        """endpoint: where outputs go."""
        sampling = SamplingParams(max_tokens=self.steps, temperature=0.0)
        route, text = Route(endpoint, ""), TextParams()
        prompts = (
            [1 + (7 * row + k) % (vocab_size - 1) for k in range(self.prompt_len + row % self.spread)]
            for row in range(self.rows)
        )
        return [GenerateRequest(uuid.uuid4().hex, 0, pack_ids(ids), 1, sampling, text, route) for ids in prompts]


@dataclass(frozen=True)
class Recording:
    """What a run was. sends: (begin, seconds) of each. host times by the driver's clock, spans always by time.monotonic."""

    depth: int
    rounds: list[Round]
    spans: list[Span]
    sends: list[tuple[float, float]]

    def steady(self, rows: int) -> list[Round]:
        """Rounds that launched a decode step of all rows after another one. Raises ValueError if there are none."""
        numbers = [i for i, r in enumerate(self.rounds) if r.step >= 0 and r.num_tokens == rows]
        if len(numbers) < 4:
            raise ValueError(f"only {len(numbers)} steps of {rows} rows; ask for more steps")
        return self.rounds[numbers[0] + 2 : numbers[-1]]


class Driver:
    """host_s: busy Python on top of the loop's own work in every step. clock: time.thread_time counts the loop's thread alone.

    engine: closed with the driver. Its depth (of the spec) must be at least that of any run.
    """

    def __init__(
        self, spec: EngineSpec, engine: Engine, num_pages: int, *, host_s: float = 0.0, clock: Clock = time.monotonic
    ) -> None:
        self._vocab_size = spec.vocab_size
        self._engine = engine
        self._sink = Inbox("tcp://127.0.0.1", KEY)
        self._requests = Inbox(f"inproc://driver-{uuid.uuid4()}", KEY)
        self._to_loop, self._to_sink = Outbox(KEY, "bench"), Outbox(KEY, "loop")
        self._sender = TimedSender(self._to_sink, clock)
        self._trace = LoopTrace(CAPACITY)
        limits = scheduler_limits(spec, num_pages)
        self._scheduler = BusyScheduler(limits, host_s) if host_s else Scheduler(limits, NoPrefixCache())
        metrics = SchedulerMetrics(CollectorRegistry(), spec.model_name, "bench")
        meter = LoopMeter(metrics, device_busy_s=engine.device_busy_s, clock=clock, trace=self._trace)
        self._loop = OverlapLoop(self._scheduler, engine, self._requests, self._sender, meter, depth=spec.depth)

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *error: object) -> None:
        self._engine.close()
        for box in (self._to_loop, self._to_sink, self._requests, self._sink):
            box.close()

    def run(self, load: Load, depth: int) -> Recording:
        """Raises what the engine raises."""
        self._loop.depth = depth
        self._scheduler.draining = False
        self._trace.clear()
        self._sender.sends.clear()
        messages = load.requests(self._sink.endpoint, self._vocab_size)
        self._to_loop.send(self._requests.endpoint, [*messages, Stop(DRAIN_S)])
        gc.collect()
        self._engine.watch_device(self._trace.add_span)
        with switch_interval(SWITCH_INTERVAL_S):
            self._loop.run()
        self._engine.device_busy_s()  # brings spans that are still unread
        self._engine.watch_device(None)
        self._sink.drain()
        return Recording(depth, self._trace.rounds, self._trace.spans, list(self._sender.sends))


class TimedSender:
    """Notes every send: (begin, seconds)."""

    def __init__(self, sender: Sender, clock: Clock) -> None:
        self._sender = sender
        self._clock = clock
        self.sends: list[tuple[float, float]] = []

    def send(self, endpoint: str, messages: list[Message]) -> bool:
        begin = self._clock()
        sent = self._sender.send(endpoint, messages)
        self.sends.append((begin, self._clock() - begin))
        return sent


class BusyScheduler(Scheduler):
    """Holds the GIL for host_s in every step, as real host work does."""

    def __init__(self, limits: Limits, host_s: float) -> None:
        super().__init__(limits, NoPrefixCache())
        self._host_s = host_s

    def plan(self, now: float) -> StepPlan | None:
        plan = super().plan(now)
        if plan is not None:
            burn(self._host_s * PLAN_SHARE)
        return plan

    def apply(self, result: StepResult, now: float) -> Outputs:
        burn(self._host_s * (1 - PLAN_SHARE))
        return super().apply(result, now)


def burn(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


@contextmanager
def switch_interval(seconds: float) -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
