"""Engines that work for a while and then break, a clock that tests move, and a patch that gives both to a `Worker`.

All of it is per class: a worker makes its engine itself, so a test makes a class of its own (`stuck_engine()`) and hands that in.
"""

from __future__ import annotations

import functools
import threading

import pytest

from overlap_serve.engine.fake import FakeEngine, FakePending, StepInputs
from overlap_serve.runtime import worker
from overlap_serve.runtime.meter import LoopMeter
from overlap_serve.step import StepResult

SETTLE_S = 10.0


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class BreakingEngine(FakeEngine):
    """Works until `armed` is set; every step that is sampled after that begins with `break_down`."""

    armed: threading.Event

    def sample(self, inputs: StepInputs) -> None:
        if self.armed.is_set():
            self.break_down()
        super().sample(inputs)

    def break_down(self) -> None:
        raise NotImplementedError


class RaisingEngine(BreakingEngine):
    def break_down(self) -> None:
        raise RuntimeError("illegal memory access")


class StuckEngine(BreakingEngine):
    """A step does not come back before `let_go` is set. stuck: the host has begun to wait for it, so the loop does nothing more."""

    stuck: threading.Event
    let_go: threading.Event
    broken: threading.Event  # the device has come to such a step

    def launch_sample(self) -> FakePending:
        return AwaitedPending(super().launch_sample(), self)

    def break_down(self) -> None:
        self.broken.set()
        assert self.let_go.wait(3 * SETTLE_S)


class AwaitedPending(FakePending):
    """Says when the host waits for a step that does not come back."""

    def __init__(self, pending: FakePending, engine: StuckEngine) -> None:
        super().__init__(pending._inputs, pending._copy_done)
        self._engine = engine

    def result(self) -> StepResult:
        while not self._copy_done.done() and not self._engine.broken.wait(0.001):
            pass
        if not self._copy_done.done():
            self._engine.stuck.set()
        return super().result()


def stuck_engine(armed: bool) -> type[StuckEngine]:
    class Engine(StuckEngine):
        stuck, let_go, broken, armed = (threading.Event() for _ in range(4))

    if armed:
        Engine.armed.set()
    return Engine


def raising_engine(armed: bool) -> type[RaisingEngine]:
    class Engine(RaisingEngine):
        armed = threading.Event()

    if armed:
        Engine.armed.set()
    return Engine


def give_to_workers(patch: pytest.MonkeyPatch, engine: type[FakeEngine], clock: Clock | None = None) -> None:
    """Workers made from here on run this engine instead of the fake one, and tell the time by this clock."""
    patch.setattr(worker, "FakeEngine", engine)
    if clock is not None:
        patch.setattr(worker, "LoopMeter", functools.partial(LoopMeter, clock=clock))
