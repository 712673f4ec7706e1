"""Start, redeploy, drain, death: what happens to open requests, processes and the key when replicas come and go."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import ray
from ray import serve

from deployments.app import build
from deployments.keys import application_key
from overlap_serve.config import parse_config
from tests.ray.conftest import APP_NAME, App, deployed, eventually, fake_args, processes, send_without_reading

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def read_stream(app: App, num_tokens: int, started: threading.Event) -> list[str]:
    """The `data:` lines of one stream, to its end."""
    lines = []
    body = app.completion(max_tokens=num_tokens, stream=True)
    with app.http.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                lines.append(line.removeprefix("data: "))
                started.set()
    return lines


def open_stream(pool: ThreadPoolExecutor, app: App, num_tokens: int) -> Future[list[str]]:
    started = threading.Event()
    future = pool.submit(read_stream, app, num_tokens, started)
    assert started.wait(10)
    return future


def end_of(lines: list[str]) -> tuple[Any, Any]:
    """finish_reason and stop_reason of the last chunk with choices, after a proper end of the stream."""
    assert lines[-1] == "[DONE]", lines[-3:]
    chunks = (json.loads(line) for line in lines[-2::-1])
    choice = next(chunk["choices"][0] for chunk in chunks if chunk.get("choices"))
    return choice["finish_reason"], choice["stop_reason"]


def finish_of(lines: list[str]) -> Any:
    return end_of(lines)[0]


def test_deletion_lets_an_open_stream_finish(cluster_url: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        with deployed(cluster_url, **fake_args()) as app:
            stream = open_stream(pool, app, 200)
        lines = stream.result(20)
    assert finish_of(lines) == "length"


def test_deletion_ends_a_stream_that_outlasts_the_drain_timeout_in_order(cluster_url: str) -> None:
    """A32: not cut off: a terminal event with `abort` and `shutdown`, then [DONE]."""
    with ThreadPoolExecutor(1) as pool:
        with deployed(cluster_url, **fake_args(drain_timeout=1.0)) as app:
            stream = open_stream(pool, app, 4000)
        lines = stream.result(20)
    assert end_of(lines) == ("abort", "shutdown")
    assert len(lines) < 1000


def test_redeploy_keeps_the_key_and_the_open_stream(cluster_url: str) -> None:
    # In a worker process: a key must not depend on who asks.
    key = ray.remote(num_cpus=0)(application_key)
    with ThreadPoolExecutor(1) as pool, deployed(cluster_url, **fake_args()) as app:
        before = ray.get(key.remote(APP_NAME))
        stream = open_stream(pool, app, 300)
        changed = parse_config(fake_args(served_model_name="renamed"))
        serve.run(build(changed), name=APP_NAME, route_prefix="/")
        eventually(
            lambda: app.http.get("/v1/models").json()["data"][0]["id"] == "renamed", 30, "the new replicas answer"
        )
        lines = stream.result(20)
        assert finish_of(lines) == "length", lines[-3:]
        assert ray.get(key.remote(APP_NAME)) == before
        answer = app.http.post("/v1/completions", json={**app.completion(max_tokens=4), "model": "renamed"})
        assert answer.status_code == 200
        assert len(processes("ray::RankActor")) == 1


def test_redeploy_lets_a_queued_request_run_and_finish(cluster_url: str) -> None:
    """Its detokenizer has no text state of it yet, and must not leave all the same."""
    with ThreadPoolExecutor(2) as pool, deployed(cluster_url, **fake_args(max_running_requests=1)) as app:
        running = open_stream(pool, app, 250)
        queued = pool.submit(read_stream, app, 20, threading.Event())
        eventually(lambda: app.health()["waiting"] == 1, 5, "the second request waits")
        changed = parse_config(fake_args(max_running_requests=1, served_model_name="renamed"))
        serve.run(build(changed), name=APP_NAME, route_prefix="/")
        assert finish_of(running.result(20)) == "length"
        assert finish_of(queued.result(20)) == "length"


def test_a_stalled_scheduler_of_two_gets_no_new_requests(cluster_url: str) -> None:
    args = fake_args(scheduler_replicas=2, ready_stall_s=2.0, live_stall_s=60.0)
    with ThreadPoolExecutor(6) as pool, deployed(cluster_url, **args) as app:
        streams = [open_stream(pool, app, 600) for _ in range(6)]
        stopped, _ = processes("ray::RankActor")
        stopped.suspend()
        try:

            def one_has_stalled() -> bool:
                states = [replica["status"] for replica in app.health()["replicas"]]  # type: ignore[attr-defined]
                return sorted(states) == ["ready", "stalled"]

            eventually(one_has_stalled, 15, "one scheduler is stalled")
            body = app.completion(max_tokens=4)
            assert [app.http.post("/v1/completions", json=body).status_code for _ in range(12)] == [200] * 12
        finally:
            stopped.resume()
        assert [finish_of(stream.result(60)) for stream in streams] == ["length"] * 6


def test_a_dead_rank_is_reported_and_replaced(cluster_url: str) -> None:
    with ThreadPoolExecutor(1) as pool, deployed(cluster_url, **fake_args()) as app:
        stream = open_stream(pool, app, 4000)
        (rank,) = processes("ray::RankActor")
        rank.kill()
        lines = stream.result(10)
        assert json.loads(lines[-1] if lines[-1] != "[DONE]" else lines[-2])["error"]["code"] == "engine_failed"

        def answers() -> bool:
            return app.http.post("/v1/completions", json=app.completion(max_tokens=4)).status_code == 200

        eventually(answers, 30, "another scheduler replica answers")
        app.check_sums()
        assert app.metrics()["overlap_requests_failed_total"] >= 1


def test_a32_the_rank_ends_when_its_replica_is_killed(cluster_url: str) -> None:
    with deployed(cluster_url, **fake_args()):
        (rank,) = processes("ray::RankActor")
        (replica,) = processes(f"ray::ServeReplica:{APP_NAME}:Scheduler")
        replica.kill()
        rank.wait(5)


def test_a_stopped_engine_process_turns_ready_off_and_is_replaced(cluster_url: str) -> None:
    """A30: SIGSTOP, so that nothing dies and no call fails."""
    args = fake_args(ready_stall_s=3.5, live_stall_s=6.0)
    with deployed(cluster_url, **args) as app:
        (rank,) = processes("ray::RankActor")
        rank.suspend()
        eventually(lambda: app.http.get("/health/ready").status_code == 503, 8, "ready is 503")
        assert app.http.get("/health/live").status_code == 200
        app.wait_ready()
        rank.wait(5)


def test_queue_full_is_429_with_retry_after(cluster_url: str) -> None:
    args = fake_args(max_running_requests=1, max_waiting_requests=1)
    with deployed(cluster_url, **args) as app, ThreadPoolExecutor(8) as pool:
        bodies = [app.completion(max_tokens=100) for _ in range(8)]
        answers = list(pool.map(lambda body: app.http.post("/v1/completions", json=body), bodies))
        refused = [answer for answer in answers if answer.status_code == 429]
        assert refused and len(refused) < 8
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        assert {answer.json()["error"]["code"] for answer in refused} == {"queue_full"}
        app.check_sums()
        counted = app.metrics()
        assert counted["overlap_requests_accepted_total"] == counted["overlap_requests_finished_total"]
        assert counted["overlap_requests_rejected_total"] + counted["overlap_requests_finished_total"] >= 8


def test_a7_a_client_that_leaves_the_queue_is_forgotten(cluster_url: str) -> None:
    """Before any output nobody but Serve knows where the request is: the cancelled call has to take it back."""
    with ThreadPoolExecutor(1) as pool, deployed(cluster_url, **fake_args(max_running_requests=1)) as app:
        running = open_stream(pool, app, 1000)
        connection = send_without_reading(app, app.completion(max_tokens=4000))
        eventually(lambda: app.health()["waiting"] == 1, 5, "the second request waits")
        connection.close()
        eventually(lambda: app.health()["waiting"] == 0, 3, "the second request is gone")
        assert not running.done()
        assert finish_of(running.result(40)) == "length"
        app.check_sums()
        assert app.metrics()["overlap_requests_aborted_total"] == 1
