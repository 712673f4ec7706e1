"""Control routes on a real cluster: they reach every scheduler and every ingress, and a pause outlives a replica."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.ray.conftest import App, deployed, eventually, fake_args, processes

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

PROMPT = "the same words for everybody, " * 4
MANY = 16  # requests that surely meet both ingress replicas and both schedulers


@pytest.fixture(scope="module")
def app(cluster_url: str) -> Iterator[App]:
    with deployed(cluster_url, **fake_args(scheduler_replicas=2, ingress_replicas=2)) as app:
        yield app


def answers_of(app: App, num_requests: int = MANY) -> list[httpx.Response]:
    """Each on a connection of its own, so that the proxy spreads them."""
    body = app.completion(prompt=PROMPT, max_tokens=1)
    return [httpx.post(f"{app.url}/v1/completions", json=body, timeout=30) for _ in range(num_requests)]


def codes_of(app: App) -> set[tuple[int, str | None]]:
    return {(a.status_code, a.json().get("error", {}).get("code")) for a in answers_of(app)}


def states(app: App) -> list[str]:
    replicas = app.health()["replicas"]
    assert isinstance(replicas, list)
    return [replica["status"] for replica in replicas]


def test_flush_reaches_every_scheduler(app: App) -> None:
    answers_of(app)
    app.wait_idle()
    flushed = app.http.post("/flush_cache").json()
    pages = len(PROMPT) // app.config.page_size
    assert flushed["schedulers"] == 2 and flushed["freed_pages"] >= 2 * pages
    assert flushed["freed_tokens"] == flushed["freed_pages"] * app.config.page_size
    assert app.http.post("/flush_cache").json()["freed_pages"] == 0


def test_flush_is_refused_while_a_scheduler_is_busy(app: App) -> None:
    body = app.completion(max_tokens=2000, stream=True)
    with app.http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        refused = httpx.post(f"{app.url}/flush_cache")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "busy")
        forced = httpx.post(f"{app.url}/flush_cache", json={"force": True})
        assert (forced.status_code, forced.json()["aborted"]) == (200, 1)
        assert '"finish_reason":"abort"' in "".join(lines)
    app.check_sums()


def test_pause_and_resume_hold_everywhere_at_once(app: App) -> None:
    for _ in range(3):
        assert app.http.post("/pause").json() == {"paused": True, "schedulers": 2, "aborted": 0}
        assert codes_of(app) == {(503, "server_paused")}
        ready = app.http.get("/health/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "paused")
        assert app.http.get("/health/live").status_code == 200
        assert app.http.post("/resume").json() == {"paused": False, "schedulers": 2}
        assert codes_of(app) == {(200, None)}


def test_a_replica_that_starts_while_paused_is_paused(app: App) -> None:
    """And those that are paused are healthy for Serve: it replaces the one that died, and no other."""
    before = {process.pid for process in processes("ray::RankActor")}
    app.http.post("/pause").raise_for_status()
    try:
        victim = processes("ray::RankActor")[0]
        victim.kill()
        eventually(lambda: len(states(app)) == 1, 20, "the lost replica is noticed")
        eventually(lambda: states(app) == ["paused", "paused"], 60, "its successor has heard of the pause")
        assert codes_of(app) == {(503, "server_paused")}
    finally:
        app.http.post("/resume").raise_for_status()
    app.wait_ready()
    eventually(lambda: states(app) == ["ready", "ready"], 10, "both take requests")
    assert codes_of(app) == {(200, None)}
    after = {process.pid for process in processes("ray::RankActor")}
    assert before - after == {victim.pid}


@pytest.mark.model
@pytest.mark.timeout(600)
def test_a_profile_of_the_engine_is_a_file_below_the_configured_folder(cluster_url: str, tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    with deployed(cluster_url, device="cpu", kv_cache_tokens=4096, profile_dir=str(folder)) as app:
        assert app.http.post("/stop_profile").json()["error"]["code"] == "profile_not_running"
        started = app.http.post("/start_profile", json={"profile_dir": "/elsewhere"})
        assert started.status_code == 200 and started.headers["x-ignored-fields"] == "profile_dir"
        again = app.http.post("/start_profile")
        assert (again.status_code, again.json()["error"]["code"]) == (409, "profile_running")
        app.http.post("/v1/completions", json=app.completion(max_tokens=5)).raise_for_status()
        stopped = app.http.post("/stop_profile")
        assert stopped.status_code == 200, stopped.text
        (profile,) = stopped.json()["profiles"]
    assert [file.name for file in folder.iterdir()] == [profile["file"]]
    with gzip.open(folder / profile["file"]) as text:
        events = json.load(text)["traceEvents"]
    # Of the engine stream, which is not the thread that has asked for the profile.
    assert {"aten::embedding", "aten::argmax"} <= {e["name"] for e in events if e.get("cat") == "cpu_op"}
