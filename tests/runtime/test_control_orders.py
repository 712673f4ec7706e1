"""What an order means with several schedulers, how orders reach a loop, and the profiler of a rank's process."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from overlap_serve.config import FakeModel, ServeConfig, fake_facts, resolve
from overlap_serve.errors import Conflict, InternalError, InvalidRequest, RequestError, ServerUnavailable
from overlap_serve.messages import AbortRequest, Ended, LoopAnswer, LoopOrder, Message
from overlap_serve.runtime.control import Control, Heard, ProfileAnswer
from overlap_serve.runtime.orders import Orders
from overlap_serve.runtime.profiler import Profiler
from tests.runtime.test_worker import HOST, Running, running  # noqa: F401  # the fixture

TORCH = ServeConfig(profile_dir="/somewhere", page_size=8)


class Several:
    """Scheduler replicas that answer what a test wants."""

    def __init__(self, *answers: Any, silent: int = 0) -> None:
        self._heard: Heard[Any] = Heard(answers, silent)
        self.orders: list[object] = []

    def paused(self) -> bool:
        return False

    async def set_paused(self, paused: bool) -> Heard[LoopAnswer]:
        self.orders.append("pause" if paused else "resume")
        return self._heard

    async def flush(self, force: bool) -> Heard[LoopAnswer]:
        self.orders.append("force" if force else "flush")
        return self._heard

    async def start_profile(self) -> Heard[ProfileAnswer]:
        return self._heard

    async def stop_profile(self) -> Heard[ProfileAnswer]:
        return self._heard


def control(several: Several, config: ServeConfig = TORCH) -> Control:
    async def abort_all() -> int:
        several.orders.append("abort")
        return 5

    return Control(config, several, abort_all)


def refusal_of(act: Awaitable[object]) -> RequestError:
    async def run() -> None:
        await act

    with pytest.raises(RequestError) as raised:
        asyncio.run(run())
    return raised.value


def test_flush_adds_up_what_all_have_freed() -> None:
    several = Several(LoopAnswer("a", freed_pages=3), LoopAnswer("b", freed_pages=4))
    answer = asyncio.run(control(several).flush(True))
    assert answer == {"schedulers": 2, "freed_pages": 7, "freed_tokens": 56, "aborted": 5}
    assert several.orders == ["abort", "force"]


def test_flush_is_refused_when_one_of_several_is_busy_and_says_what_was_freed() -> None:
    error = refusal_of(control(Several(LoopAnswer("a", freed_pages=3), LoopAnswer("b", busy=True))).flush(False))
    assert isinstance(error, Conflict) and error.code == "busy"
    assert "1 of 2 scheduler(s)" in error.message and "3 pages" in error.message


def test_open_requests_end_only_after_nothing_new_can_come() -> None:
    several = Several(LoopAnswer("a"))
    assert asyncio.run(control(several).pause(True)) == {"paused": True, "schedulers": 1, "aborted": 5}
    assert several.orders == ["pause", "abort"]


ACTS: list[Callable[[Control], Awaitable[object]]] = [
    lambda it: it.flush(False),
    lambda it: it.pause(False),
    lambda it: it.resume(),
    lambda it: it.start_profile(),
    lambda it: it.stop_profile(),
]


@pytest.mark.parametrize("act", ACTS)
def test_silence_is_never_taken_for_consent(act: Callable[[Control], Awaitable[object]]) -> None:
    error = refusal_of(act(control(Several(silent=2))))
    assert isinstance(error, ServerUnavailable) and "2 of 2" in error.message


DONE, NONE = ProfileAnswer("r0", "done", "r0.gz"), ProfileAnswer("r1", "none")


def test_a_profile_is_a_conflict_only_when_no_replica_could_act() -> None:
    assert asyncio.run(control(Several(DONE, NONE)).start_profile()) == {"replicas": ["r0"], "limit_s": 60.0}
    assert asyncio.run(control(Several(DONE, NONE)).stop_profile()) == {
        "profiles": [{"replica": "r0", "file": "r0.gz"}]
    }
    starting, stopping = (refusal_of(act(control(Several(NONE, NONE)))) for act in ACTS[3:])
    assert (starting.http_status, starting.code) == (409, "profile_running")
    assert (stopping.http_status, stopping.code) == (409, "profile_not_running")


def test_a_profile_that_failed_is_an_error_of_the_server() -> None:
    error = refusal_of(control(Several(DONE, ProfileAnswer("r1", "failed", "No space left on device"))).stop_profile())
    assert isinstance(error, InternalError) and "No space left on device" in error.message


@pytest.mark.parametrize(("config", "hint"), [(ServeConfig(), "profile_dir"), (ServeConfig(engine="fake"), "fake")])
def test_profiling_without_a_folder_or_an_engine_is_unsupported(config: ServeConfig, hint: str) -> None:
    for act in ACTS[3:]:
        error = refusal_of(act(control(Several(DONE), config)))
        assert isinstance(error, InvalidRequest) and error.code == "unsupported_operation" and hint in error.message


# -- orders


def test_an_order_gets_its_own_answer() -> None:
    sent: list[LoopOrder] = []

    def deliver(messages: list[Message]) -> bool:
        sent.extend(message for message in messages if isinstance(message, LoopOrder))
        return True

    async def scenario() -> None:
        orders = Orders(deliver)
        flush, pause = (asyncio.create_task(orders.send(action)) for action in ("flush", "pause"))
        await asyncio.sleep(0)
        orders.answered(LoopAnswer("unknown"))
        orders.answered(LoopAnswer(sent[1].id))
        orders.answered(LoopAnswer(sent[0].id, freed_pages=2))
        assert (await flush).freed_pages == 2 and (await pause).freed_pages == 0

    asyncio.run(scenario())


def test_a_loop_that_takes_or_says_nothing_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overlap_serve.runtime.orders.TIMEOUT_S", 0.01)
    for takes in (False, True):
        error = refusal_of(Orders(lambda _, takes=takes: takes).send("flush"))  # type: ignore[misc]
        assert isinstance(error, ServerUnavailable)


def test_a_worker_obeys_and_shows_it_in_its_status(running: Running) -> None:  # noqa: F811
    def order(action: Any) -> LoopAnswer:
        running.outbox.send(running.worker.endpoint, [LoopOrder(action, action)])
        (answer,) = running.control.drain(10.0)
        assert isinstance(answer, LoopAnswer) and answer.id == action
        return answer

    running.submit("r", 5, range(40))
    running.until_ended("r")
    order("pause")
    assert running.worker.status().status == "paused"
    running.submit("refused", 5)
    (output,) = running.detokenizer.drain(10.0)
    assert running.control.drain(10.0)
    assert output.failure.code == "server_paused"  # type: ignore[union-attr]
    assert order("flush").freed_pages == 2
    order("resume")
    assert running.worker.status().status == "ready"
    running.submit("s", 5)
    running.until_ended("s")


@pytest.mark.parametrize("depth", [0, 1])
def test_a_row_that_has_ended_and_is_in_flight_is_waited_for_and_not_busy(depth: Literal[0, 1]) -> None:
    config = ServeConfig(engine="fake", fake=FakeModel(base_ms=20.0), overlap_depth=depth)
    rank = Running(resolve(config, fake_facts(config.fake), HOST, ""))
    try:
        rank.submit("r", 1000, range(40))
        assert rank.detokenizer.drain(10.0)
        rank.outbox.send(rank.worker.endpoint, [AbortRequest("r", "client"), LoopOrder("now", "flush")])
        messages: list[Message] = []
        while len(messages) < 2:
            messages += rank.control.drain(10.0)
        assert messages == [Ended("r", 0), LoopAnswer("now", freed_pages=2)]
        rank.worker.check_at_rest()
    finally:
        rank.close()


# -- profiler


class Busy:
    """A thread that multiplies while the block lasts."""

    def __enter__(self) -> Busy:
        self._end = threading.Event()
        self.rounds = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def wait(self, rounds: int) -> None:
        for _ in range(rounds):
            assert self.rounds.acquire(timeout=10)

    def _run(self) -> None:
        matrix = torch.eye(8)
        while not self._end.wait(0.001):
            torch.mm(matrix, matrix)
            self.rounds.release()


def operators_in(file: Path) -> set[str]:
    with gzip.open(file) as text:
        return {event["name"] for event in json.load(text)["traceEvents"] if event.get("cat") == "cpu_op"}


def test_a_profile_holds_the_operators_of_threads_that_ran_before_it(tmp_path: Path) -> None:
    profiler = Profiler("app#Scheduler/x y")
    folder = tmp_path / "made" / "for it"
    with Busy() as busy:
        assert profiler.start(folder).outcome == "done"
        assert profiler.start(folder).outcome == "none"
        while busy.rounds.acquire(blocking=False):
            pass
        busy.wait(5)
        answer = profiler.stop()
    assert answer.outcome == "done" and answer.text.startswith("app-Scheduler-x-y-")
    assert [file.name for file in folder.iterdir()] == [answer.text]
    assert "aten::mm" in operators_in(folder / answer.text)
    assert profiler.stop().outcome == "none"


def test_a_profile_that_nobody_ends_ends_by_itself_and_its_file_is_told_later(tmp_path: Path) -> None:
    profiler = Profiler("r", limit_s=0.01)
    profiler.start(tmp_path)
    (recorder,) = (thread for thread in threading.enumerate() if thread.name == "profiler")
    recorder.join(30)
    answer = profiler.stop()
    assert answer.outcome == "done" and (tmp_path / answer.text).is_file()
    assert profiler.start(tmp_path).outcome == "done"
    assert profiler.stop().outcome == "done"


def test_a_folder_that_cannot_be_is_a_failure_without_paths(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    answer = Profiler("r").start(file / "sub")
    assert (answer.outcome, answer.text) == ("failed", "Not a directory")


def test_a_file_that_cannot_be_written_is_a_failure_and_nothing_is_left(tmp_path: Path) -> None:
    profiler = Profiler("r")
    profiler.start(tmp_path)
    tmp_path.rmdir()
    answer = profiler.stop()
    assert answer.outcome == "failed" and str(tmp_path) not in answer.text
    assert profiler.start(tmp_path).outcome == "done"
    assert profiler.stop().outcome == "done"
