"""Processes that die or stand still under load: what every client gets, how fast, and that Serve puts back what was lost.

One application for all; each test leaves it whole. Prints detection (until the last client had its end) and recovery (until a new
request was answered) for docs/operations.md.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import psutil
import pytest
import ray
from ray.util.placement_group import placement_group_table

from tests.ray.broken import RaisingScheduler, StuckScheduler
from tests.ray.conftest import APP_NAME, App, deployed, eventually, fake_args, processes

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

NUM_STREAMS = 16
NUM_QUEUED = 4  # wait for a slot: nothing of them has been sent
LONG = 1900  # tokens, 19 s; all streams together fit the fake engine's pages
END_S = 10.0  # within which every client has its end
RECOVERY_S = 30.0

RANK = "ray::RankActor"
SCHEDULER = f"ray::ServeReplica:{APP_NAME}:Scheduler"
DETOKENIZER = f"ray::ServeReplica:{APP_NAME}:Detokenizer"
INGRESS = f"ray::ServeReplica:{APP_NAME}:Ingress"


@pytest.fixture(scope="module")
def app(cluster_url: str) -> Iterator[App]:
    with deployed(cluster_url, **fake_args(max_running_requests=NUM_STREAMS)) as app:
        yield app


@dataclass
class Outcome:
    """What one client saw. cut: the connection broke instead of ending."""

    status: int = 0
    retry_after: str | None = None
    data: list[str] = field(default_factory=list)
    code: str = ""
    cut: bool = False
    ended_s: float = 0.0
    started: threading.Event = field(default_factory=threading.Event)

    @property
    def done(self) -> bool:
        return self.data[-1:] == ["[DONE]"]


def read(app: App, outcome: Outcome, stream: bool) -> Outcome:
    """One request, to its end."""
    body = app.completion(max_tokens=LONG, stream=stream, prompt=str(time.monotonic_ns()))
    try:
        with app.http.stream("POST", "/v1/completions", json=body) as answer:
            outcome.status, outcome.retry_after = answer.status_code, answer.headers.get("retry-after")
            if answer.status_code != 200:
                outcome.code = error_code(answer.read().decode())  # none in what HAProxy says by itself
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    outcome.data.append(line.removeprefix("data: "))
                    outcome.started.set()
                    outcome.code = outcome.code or error_code(outcome.data[-1])
    except httpx.TransportError:
        outcome.cut = True
    outcome.ended_s = time.monotonic()
    return outcome


def error_code(data: str) -> str:
    return str(json.loads(data)["error"]["code"]) if data.startswith('{"error"') else ""


@dataclass
class Load:
    """streams: have got text. queued: have got nothing."""

    streams: list[Future[Outcome]]
    queued: list[Future[Outcome]]


@contextmanager
def loaded(app: App, num_streams: int = NUM_STREAMS) -> Iterator[Load]:
    """All slots taken by streams that have begun, and a queue behind them."""
    with ThreadPoolExecutor(num_streams + NUM_QUEUED) as pool:
        outcomes = [Outcome() for _ in range(num_streams)]
        streams = [pool.submit(read, app, outcome, True) for outcome in outcomes]
        assert all(outcome.started.wait(10) for outcome in outcomes)
        queued = [pool.submit(read, app, Outcome(), i % 2 == 0) for i in range(NUM_QUEUED)]
        eventually(lambda: app.health()["waiting"] == NUM_QUEUED, 5, "the queue is seen")
        yield Load(streams, queued)


def answers(app: App) -> bool:
    try:
        return app.http.post("/v1/completions", json=app.completion(max_tokens=4)).status_code == 200
    except httpx.TransportError:
        return False


def held() -> tuple[float, int]:
    """CPUs that are free, and placement groups that stand."""
    groups = [group for group in placement_group_table().values() if group["state"] != "REMOVED"]
    return round(ray.available_resources().get("CPU", 0.0), 3), len(groups)


def victim(title: str) -> psutil.Process:
    (process,) = processes(title)
    return process


def report(fault: str, begin_s: float, ended_s: float, recovered_s: float) -> None:
    print(f"FAULT {fault}: clients ended after {ended_s - begin_s:.1f} s, recovered after {recovered_s:.1f} s")


def check_whole_again(app: App, title: str, dead: int, before: tuple[float, int]) -> None:
    """The process was replaced, nothing is left of the old requests, and no resource is lost."""
    app.wait_ready()
    eventually(
        lambda: [process.pid != dead for process in processes(title)] == [True], RECOVERY_S, f"one new {title} is there"
    )
    eventually(lambda: held() == before, 15, f"resources are as before: {before}")
    app.check_sums()


def check_documented_ends(load: Load, timeout_s: float) -> list[Outcome]:
    """Text was sent: an error event and [DONE]. Nothing was sent: 503 with Retry-After. Never a cut connection."""
    streams = [future.result(timeout_s) for future in load.streams]
    queued = [future.result(timeout_s) for future in load.queued]
    assert not any(outcome.cut for outcome in (*streams, *queued))
    assert {(outcome.code, outcome.done) for outcome in streams} == {("engine_failed", True)}
    assert {(outcome.status, outcome.code) for outcome in queued} == {(503, "engine_failed")}
    assert all(int(outcome.retry_after or 0) >= 1 for outcome in queued)
    return [*streams, *queued]


@pytest.mark.parametrize("title", [RANK, SCHEDULER, DETOKENIZER], ids=["rank", "scheduler", "detokenizer"])
def test_a_killed_process_gives_every_client_its_end_and_is_replaced(app: App, title: str) -> None:
    app.wait_idle()
    before = held()
    process = victim(title)
    with loaded(app) as load:
        begin_s = time.monotonic()
        process.kill()
        recovered_s = eventually(lambda: answers(app), RECOVERY_S, "a new request is answered")
        ended = check_documented_ends(load, END_S)
    ended_s = max(outcome.ended_s for outcome in ended)
    report(title, begin_s, ended_s, recovered_s)
    assert ended_s - begin_s < END_S
    check_whole_again(app, title, process.pid, before)


def test_a_killed_ingress_frees_schedulers_and_detokenizers(app: App) -> None:
    """Its clients see a cut connection. Nobody reads their output any more, so nobody may go on making it."""
    app.wait_idle()
    before = held()
    process = victim(INGRESS)
    with loaded(app) as load:
        begin_s = time.monotonic()
        process.kill()
        ended = [future.result(END_S) for future in (*load.streams, *load.queued)]
        recovered_s = eventually(lambda: answers(app), RECOVERY_S, "a new request is answered")
    report(INGRESS, begin_s, max(outcome.ended_s for outcome in ended), recovered_s)
    assert all(outcome.cut and not outcome.done for outcome in ended[:NUM_STREAMS])
    assert all(outcome.cut or outcome.status >= 500 for outcome in ended[NUM_STREAMS:])
    # Streams would have run for 19 s, and the queue behind them as long again.
    assert time.monotonic() - begin_s < 15, "too late to tell an abort from an end"
    check_whole_again(app, INGRESS, process.pid, before)
    print(f"FAULT {INGRESS}: all is free after {time.monotonic() - begin_s:.1f} s")
    assert time.monotonic() - begin_s < 18


def test_a30_an_engine_that_raises_each_step_is_replaced(cluster_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.app.SchedulerReplica", RaisingScheduler)
    with deployed(cluster_url, **fake_args(max_running_requests=NUM_STREAMS)) as app:
        before = held()
        process = victim(RANK)
        with loaded(app) as load:
            ended = check_documented_ends(load, 2 * END_S)
        assert max(outcome.ended_s for outcome in ended) - min(outcome.ended_s for outcome in ended) < END_S
        eventually(lambda: answers(app), RECOVERY_S, "a new request is answered")
        check_whole_again(app, RANK, process.pid, before)
        assert app.metrics()["overlap_requests_failed_total"] >= NUM_STREAMS + NUM_QUEUED


@pytest.mark.parametrize("stopped", [True, False], ids=["SIGSTOP", "step-that-never-returns"])
def test_a30_an_engine_that_stands_still_is_told_apart_and_replaced(
    cluster_url: str, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    """Under load; nothing dies and no call fails by itself. A stopped process is silent; one that waits for its device says so."""
    if not stopped:
        monkeypatch.setattr("deployments.app.SchedulerReplica", StuckScheduler)
    args = fake_args(max_running_requests=NUM_STREAMS, ready_stall_s=3.5, live_stall_s=6.0)
    with deployed(cluster_url, **args) as app:
        before = held()
        process = victim(RANK)
        with loaded(app) as load:
            begin_s = time.monotonic()
            if stopped:
                process.suspend()
            not_ready_s = eventually(lambda: app.http.get("/health/ready").status_code == 503, 15, "ready is 503")
            assert app.health()["status"] == "stalled"
            assert app.http.get("/health/live").status_code == 200  # the ingress itself is well
            refused = app.http.post("/v1/completions", json=app.completion(max_tokens=4))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_failed")
            assert not any(future.done() for future in (*load.streams, *load.queued)), "an end that is none"
            ended = check_documented_ends(load, 30)
        eventually(lambda: answers(app), RECOVERY_S, "a new request is answered")
        fault = "SIGSTOP" if stopped else "step"
        print(f"FAULT {fault}: not ready after {not_ready_s:.1f} s")
        report(fault, begin_s, max(outcome.ended_s for outcome in ended), time.monotonic() - begin_s)
        check_whole_again(app, RANK, process.pid, before)
        assert not process.is_running()
