"""`LoopMeter`: what the loop says about itself. A heartbeat for health checks, and counts and times for `/metrics`.

The loop's thread writes, other threads read single values. Gauges are published at most every PUBLISH_S, and always when the
loop goes idle, so that they are zero within a second after the last request.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from overlap_serve.metrics import SchedulerMetrics
from overlap_serve.runtime.trace import LoopTrace, Round
from overlap_serve.scheduler.outputs import Counters
from overlap_serve.scheduler.scheduler import Scheduler
from overlap_serve.step import StepPlan

PUBLISH_S = 0.1


@dataclass
class Progress:
    """at: clock of the last round's end. runnable: work is there, so silence is a stall."""

    at: float
    runnable: bool = False
    draining: bool = False
    paused: bool = False
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0


class Totals(msgspec.Struct):
    """Seconds of all rounds with work since the start. host_s: planning, launching, processing; waits for the device excluded."""

    rounds_s: float = 0.0
    host_s: float = 0.0


class LoopMeter:
    """metrics None: heartbeat only (tests, benchmarks). trace: where rounds with work are noted; None: nowhere."""

    def __init__(
        self,
        metrics: SchedulerMetrics | None = None,
        *,
        device_busy_s: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
        trace: LoopTrace | None = None,
    ) -> None:
        self.clock = clock
        self.trace = trace
        self.progress = Progress(at=clock())
        self.totals = Totals()
        self._metrics = metrics
        self._device_busy_s = device_busy_s
        self._published = Counters()
        self._unpublished: list[tuple[float, float, float, float, int]] = []  # plan, launch, wait, process (s), tokens
        self._publish_at = 0.0
        self._round_began = clock()

    def age_s(self) -> float:
        """Seconds since the last progress; 0 when idle."""
        return max(0.0, self.clock() - self.progress.at) if self.progress.runnable else 0.0

    def round(
        self,
        scheduler: Scheduler,
        plan: StepPlan | None,
        blocked: bool,
        marks: tuple[float, float, float, float],
        waited_s: float,
    ) -> None:
        """Note one round. marks: before plan, after plan, after launch, after processing."""
        begin, planned, launched, end = marks
        if not blocked:
            self.totals.rounds_s += end - self._round_began
            self.totals.host_s += end - self._round_began - waited_s
            if self.trace is not None:
                step, num_tokens = (-1, 0) if plan is None else (plan.step, scheduler.last_step_tokens)
                self.trace.add_round(
                    Round(step, num_tokens, self._round_began, begin, planned, launched, waited_s, end)
                )
        self._round_began = end
        self.progress.at = end
        self.progress.runnable = not scheduler.at_rest
        self.progress.draining = scheduler.draining
        if self._metrics is not None and plan is not None:
            # Observed when published: five histograms a step would cost as much as planning a small one.
            process_s = end - launched - waited_s
            self._unpublished.append(
                (planned - begin, launched - planned, waited_s, process_s, scheduler.last_step_tokens)
            )
        if blocked or end >= self._publish_at:
            self._publish_at = end + PUBLISH_S
            self._publish(scheduler)

    def start(self, scheduler: Scheduler) -> None:
        """Before the first round, which waits for a request: an engine that has had none shows its pages too."""
        self._publish(scheduler)

    def received(self) -> None:
        """The loop has waited for messages: idle time is not part of the round that begins now."""
        self._round_began = self.clock()
        self.progress.at = self._round_began
        self.progress.runnable = True

    def _publish(self, scheduler: Scheduler) -> None:
        pages = scheduler.pages_by_state()
        self.progress.running = scheduler.num_running
        self.progress.waiting = scheduler.num_waiting
        self.progress.kv_usage = pages["owned"] / scheduler.limits.num_pages
        if self._metrics is not None:
            self._count(scheduler, self._metrics)
            self._gauge(scheduler, self._metrics, pages)
        scheduler.times.clear()

    def _count(self, scheduler: Scheduler, metrics: SchedulerMetrics) -> None:
        now, before = scheduler.counters, self._published
        metrics.prompt_tokens.inc(now.prompt_tokens - before.prompt_tokens)
        metrics.cached_tokens.inc(now.cached_tokens - before.cached_tokens)
        metrics.generation_tokens.inc(now.generated_tokens - before.generated_tokens)
        metrics.discarded_tokens.inc(now.discarded_tokens - before.discarded_tokens)
        metrics.prefix_queries.inc(now.queried_tokens - before.queried_tokens)
        metrics.prefix_hits.inc(now.hit_tokens - before.hit_tokens)
        metrics.preemptions.inc(now.preemptions - before.preemptions)
        metrics.repairs.inc(now.repairs - before.repairs)
        self._published = msgspec.structs.replace(now)
        self._observe_steps(metrics)
        for times in scheduler.times:
            for histogram, seconds in (
                (metrics.queue_time, times.queue_s),
                (metrics.prefill_time, times.prefill_s),
                (metrics.decode_time, times.decode_s),
            ):
                if seconds is not None:
                    histogram.observe(seconds)

    def _observe_steps(self, metrics: SchedulerMetrics) -> None:
        step_s = metrics.step_s
        for plan_s, launch_s, wait_s, process_s, num_tokens in self._unpublished:
            step_s["plan"].observe(plan_s)
            step_s["launch"].observe(launch_s)
            step_s["wait"].observe(wait_s)
            step_s["process"].observe(process_s)
            metrics.step_tokens.observe(num_tokens)
        self._unpublished.clear()

    def _gauge(self, scheduler: Scheduler, metrics: SchedulerMetrics, pages: dict[str, int]) -> None:
        metrics.running.set(scheduler.num_running)
        for reason, count in scheduler.waiting_by_reason().items():
            metrics.waiting[reason].set(count)
        for state, count in pages.items():
            metrics.pages[state].set(count)
        metrics.kv_usage.set(self.progress.kv_usage)
        if self.totals.host_s > 0:
            idle_s = max(0.0, self.totals.rounds_s - self._device_busy_s())
            metrics.device_idle.set(min(1.0, idle_s / self.totals.rounds_s))
            metrics.host_hidden.set(max(0.0, 1.0 - idle_s / self.totals.host_s))
