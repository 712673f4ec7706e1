"""`Worker`: rank 0, and `Follower`: each other rank. Build device, engine, scheduler and loop from an `EngineSpec`, run the loop in
the calling thread.

Decides nothing: it builds and connects. `run` blocks; the other methods may be called from any thread.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path

from prometheus_client import CollectorRegistry

from overlap_serve.cache.prefix import NoPrefixCache, PrefixCache
from overlap_serve.cache.radix import RadixCache
from overlap_serve.config import EngineSpec
from overlap_serve.device.thread import ThreadStreams
from overlap_serve.engine.base import Engine
from overlap_serve.engine.fake import FakeEngine
from overlap_serve.messages import ReplicaStatus, Stop
from overlap_serve.metrics import SchedulerMetrics, TransportMetrics, build_info, snapshot
from overlap_serve.runtime.control import ProfileAnswer
from overlap_serve.runtime.loop import OverlapLoop
from overlap_serve.runtime.meter import LoopMeter
from overlap_serve.runtime.profiler import Profiler
from overlap_serve.runtime.ranks import FollowerLoop, LeadingEngine, Seat
from overlap_serve.scheduler.limits import Limits
from overlap_serve.scheduler.scheduler import Scheduler
from overlap_serve.transport import Inbox, Outbox


class Worker:
    """bind: zmq address of the inbox ("tcp://IP" takes a free port). control: endpoint that is told which requests ended.

    stall_s: after this long without progress and with runnable work the status is `stalled`. seat, addresses: with several ranks, of
    this rank and of all (see `ranks`); the constructors of all ranks wait for each other.
    Raises ModelLoadError or ConfigError from the constructor when the engine cannot be built.
    """

    def __init__(
        self,
        spec: EngineSpec,
        bind: str,
        key: bytes,
        *,
        control: str,
        replica: str,
        stall_s: float = 15.0,
        seat: Seat | None = None,
        addresses: tuple[str, ...] = (),
    ) -> None:
        self._registry = CollectorRegistry()
        self._metrics = SchedulerMetrics(self._registry, spec.model_name, replica)
        self._metrics.depth.set(spec.depth)
        transport = TransportMetrics(self._registry, replica)
        self._replica = replica
        self._key = key
        self._stall_s = stall_s
        engine, num_pages, torch_version = build_engine(spec, seat, addresses)
        self._engine = engine
        if spec.tp_size > 1:
            # Never idle: a connection that is closed and made anew may lose a plan.
            plans = Outbox(key, "plan", sent=transport.sent, dropped=transport.dropped, idle_s=math.inf)
            self._engine = LeadingEngine(engine, plans, addresses[1:])
        build_info(self._registry, replica, torch=torch_version, attention=spec.attention_backend)
        self._inbox = Inbox(bind, key, refused=transport.refused)
        self._outbox = Outbox(key, "scheduler", sent=transport.sent, dropped=transport.dropped)
        self.endpoint = self._inbox.endpoint
        self.capacity_tokens = spec.capacity_tokens(num_pages)
        self._scheduler = Scheduler(scheduler_limits(spec, num_pages), build_cache(spec), self.endpoint)
        self._meter = LoopMeter(self._metrics, device_busy_s=self._engine.device_busy_s)
        self._loop = OverlapLoop(
            self._scheduler, self._engine, self._inbox, self._outbox, self._meter, depth=spec.depth, control=control
        )
        self._profiler = Profiler(replica)
        self._stopped = False

    def run(self) -> None:
        """The loop, until `stop`. Raises what the engine raised, after every open request has got its terminal output."""
        with ExitStack() as closing:
            closing.callback(self._engine.close)  # last: a broken device may raise again, or hang
            closing.callback(self._outbox.close)
            closing.callback(self._inbox.close)
            closing.callback(setattr, self, "_stopped", True)
            self._loop.run()

    def stop(self, drain_s: float = 0.0) -> None:
        """Let running requests go on for drain_s, end the rest with abort/shutdown, and make `run` return."""
        outbox = Outbox(self._key, "stop")
        outbox.send(self.endpoint, [Stop(drain_s)])
        outbox.close()

    def status(self) -> ReplicaStatus:
        progress, age_s = self._meter.progress, self._meter.age_s()
        return ReplicaStatus(
            replica=self._replica,
            status="dead"
            if self._stopped
            else "stalled"
            if age_s > self._stall_s
            else "draining"
            if progress.draining
            else "paused"
            if progress.paused
            else "ready",
            last_step_age_s=age_s,
            running=progress.running,
            waiting=progress.waiting,
            capacity_tokens=self.capacity_tokens,
            kv_usage=progress.kv_usage,
            endpoint=self.endpoint,
        )

    def metrics_snapshot(self) -> bytes:
        self._metrics.last_step_age.set(self._meter.age_s())
        return snapshot(self._registry)

    def start_profile(self, folder: Path) -> ProfileAnswer:
        """See `Profiler`; of this process alone."""
        return self._profiler.start(folder)

    def stop_profile(self) -> ProfileAnswer:
        """Blocks until the file is written."""
        return self._profiler.stop()

    def check_at_rest(self) -> None:
        """AssertionError unless nothing is open and all pages and slots are accounted for; for tests, while the loop is idle."""
        assert self._scheduler.at_rest, "requests are open"
        self._scheduler.check_accounting()


class Follower:
    """Any rank but 0. Raises from the constructor as `Worker` does."""

    def __init__(self, spec: EngineSpec, seat: Seat, addresses: tuple[str, ...]) -> None:
        assert seat.inbox is not None, "rank 0 does not follow"
        self._inbox = seat.inbox
        self._engine, _, _ = build_engine(spec, seat, addresses)
        self._loop = FollowerLoop(self._engine, self._inbox, depth=spec.depth)

    def run(self) -> None:
        """Until rank 0's engine is closed. Raises what the engine raised."""
        with ExitStack() as closing:
            closing.callback(self._engine.close)
            closing.callback(self._inbox.close)
            self._loop.run()


def scheduler_limits(spec: EngineSpec, num_pages: int) -> Limits:
    return Limits(
        num_pages=num_pages,
        page_size=spec.page_size,
        num_slots=spec.max_running,
        max_model_len=spec.max_model_len,
        vocab_size=spec.vocab_size,
        max_step_tokens=spec.max_step_tokens,
        max_waiting=spec.max_waiting,
        max_decode_gap_steps=spec.max_decode_gap_steps,
        max_prefill_wait_steps=spec.max_prefill_wait_steps,
        max_bypass=spec.max_bypass,
    )


def build_cache(spec: EngineSpec) -> PrefixCache:
    return RadixCache(spec.page_size) if spec.prefix_cache == "radix" else NoPrefixCache()


def build_engine(
    spec: EngineSpec, seat: Seat | None = None, addresses: tuple[str, ...] = ()
) -> tuple[Engine, int, str]:
    """The engine of one rank, its number of KV pages, and the torch version ("" without torch)."""
    if spec.engine == "torch":
        # Not at the top: a process of the fake engine never loads torch (3 s and 300 MB).
        from overlap_serve.runtime.torch_engine import build_torch_engine

        return build_torch_engine(spec, seat, addresses)
    engine = FakeEngine(
        ThreadStreams(),
        num_slots=spec.max_running,
        num_pages=spec.num_pages,
        page_size=spec.page_size,
        max_model_len=spec.max_model_len,
        eos_every=spec.fake_eos_every,
        step_s=lambda num_tokens: spec.fake_base_s + spec.fake_per_token_s * num_tokens,
    )
    return engine, spec.num_pages, ""
