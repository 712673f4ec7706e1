"""Flush, pause, resume, profile and /health/generate over HTTP, with one scheduler: behaviour, bodies and refusals."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from deployments.control import CONTROL_PATHS
from overlap_serve.config import FakeModel
from overlap_serve.messages import ReplicaStatus
from tests.http.raw import CHAT, COMPLETIONS, RawPost, chat_body, completion_body
from tests.http_rig import HttpRig, http_rig, samples

FAKE = FakeModel(base_ms=2.0, max_model_len=4096)
CONFIG = {"page_size": 4, "kv_cache_tokens": 32_768}
PROMPT = [65, 66, 67, 68] * 8
LONG = 4000


def prompt_body(**fields: object) -> dict[str, object]:
    return completion_body(**{"prompt": PROMPT, "ignore_eos": True, "max_tokens": 1, **fields})


def cached_tokens(answer: httpx.Response) -> int:
    found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def reasons_of(stream: RawPost) -> list[tuple[str, object]]:
    """(finish_reason, stop_reason) of the choices that ended in a stream."""
    stream.read_events(10**6)
    events = [line[6:] for line in stream.received.decode().splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return [(choice["finish_reason"], choice["stop_reason"]) for choice in choices if choice["finish_reason"]]


@contextmanager
def running(rig: HttpRig, **fields: object) -> Iterator[RawPost]:
    """A long stream that has had some output."""
    with RawPost(rig, COMPLETIONS, prompt_body(**{"stream": True, "max_tokens": LONG, **fields})) as stream:
        stream.read_events(3)
        yield stream


@contextmanager
def paused(http: httpx.Client, **body: object) -> Iterator[httpx.Response]:
    answer = http.post("/pause", json=body)
    assert answer.status_code == 200, answer.text
    try:
        yield answer
    finally:
        assert http.post("/resume").json() == {"paused": False, "schedulers": 1}


# -- flush


def test_flush_drops_the_prefix_cache_and_says_how_much(rig: HttpRig) -> None:
    with rig.http() as http:
        http.post("/flush_cache").raise_for_status()
        assert [cached_tokens(http.post(COMPLETIONS, json=prompt_body())) for _ in range(2)] == [0, 28]
        answer = http.post("/flush_cache")
        expected = {"schedulers": 1, "freed_pages": 8, "freed_tokens": 32, "aborted": 0}
        assert (answer.status_code, answer.json()) == (200, expected)
        assert http.post("/flush_cache").json()["freed_pages"] == 0
        assert cached_tokens(http.post(COMPLETIONS, json=prompt_body())) == 0


def test_flush_while_busy_is_409_and_changes_nothing(rig: HttpRig) -> None:
    with rig.http() as http:
        http.post(COMPLETIONS, json=prompt_body()).raise_for_status()
        with running(rig):
            for body in ({}, {"force": False}):
                refused = http.post("/flush_cache", json=body)
                assert (refused.status_code, refused.json()["error"]["code"]) == (409, "busy")
                assert refused.json()["error"]["type"] == "conflict_error"
            assert cached_tokens(http.post(COMPLETIONS, json=prompt_body())) == 28


@pytest.mark.parametrize("n", [1, 3])
def test_flush_by_force_ends_open_requests_with_abort(rig: HttpRig, n: int) -> None:
    with rig.http() as http, running(rig, n=n) as stream:
        answer = http.post("/flush_cache", json={"force": True}).json()
        assert answer["aborted"] == 1 and answer["freed_pages"] >= 8
        assert reasons_of(stream) == [("abort", "client_abort")] * n
        assert cached_tokens(http.post(COMPLETIONS, json=prompt_body())) == 0


def test_flush_by_force_ends_prompts_that_have_not_begun(rig: HttpRig) -> None:
    """More choices than a scheduler gets at once: the rest must not follow as the first end."""
    body = completion_body(prompt=["x"] * 20, n=8, best_of=8, max_tokens=LONG, stream=True, ignore_eos=True)
    with rig.http() as http, RawPost(rig, COMPLETIONS, body) as stream:
        stream.read_events(3)
        assert http.post("/flush_cache", json={"force": True}).json()["aborted"] == 1
        assert {finish for finish, _ in reasons_of(stream)} == {"abort"}


# -- pause


@pytest.mark.parametrize("kind", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
def test_while_paused_new_requests_get_503_and_readiness_says_so(rig: HttpRig, kind: str, stream: bool) -> None:
    body = {**(chat_body() if kind == CHAT else completion_body()), "max_tokens": 1, "stream": stream}
    with rig.http() as http:
        with paused(http) as answer:
            assert answer.json() == {"paused": True, "schedulers": 1, "aborted": 0}
            refused = http.post(kind, json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_paused")
            assert int(refused.headers["retry-after"]) >= 1
            ready, live = http.get("/health/ready"), http.get("/health/live")
            assert (ready.status_code, ready.json()["status"]) == (503, "paused")
            assert [replica["status"] for replica in ready.json()["replicas"]] == ["paused"]
            assert (live.status_code, http.get("/health/startup").status_code) == (200, 200)
            assert http.post("/tokenize", json={"prompt": "x"}).status_code == 200
        assert http.get("/health/ready").status_code == 200
        assert http.post(kind, json=body).status_code == 200


def test_pause_and_resume_are_idempotent(rig: HttpRig) -> None:
    with rig.http() as http:
        for _ in range(2):
            assert http.post("/pause").json()["paused"] is True
        for _ in range(2):
            assert http.post("/resume", json={}).json()["paused"] is False
        assert http.post(COMPLETIONS, json=prompt_body()).status_code == 200


def test_open_requests_go_on_while_paused(rig: HttpRig) -> None:
    with rig.http() as http, running(rig, max_tokens=300) as stream, paused(http):
        assert reasons_of(stream) == [("length", None)]


def test_prompts_of_an_open_request_that_wait_for_their_turn_run_while_paused(rig: HttpRig) -> None:
    prompts = [[65 + i] for i in range(20)]
    body = completion_body(prompt=prompts, n=8, best_of=8, max_tokens=40, stream=True, ignore_eos=True)
    with rig.http() as http, RawPost(rig, COMPLETIONS, body) as stream:
        stream.read_events(3)
        with paused(http):
            assert reasons_of(stream) == [("length", None)] * 160


def test_pause_with_abort_ends_open_requests(rig: HttpRig) -> None:
    with rig.http() as http, running(rig) as stream, paused(http, abort=True) as answer:
        assert answer.json()["aborted"] == 1
        assert reasons_of(stream) == [("abort", "client_abort")]


def test_a_scheduler_refuses_what_an_ingress_that_has_not_heard_sends(rig: HttpRig) -> None:
    capacity = rig.worker.status().capacity_tokens
    with rig.http() as http, paused(http):
        rig.cluster.ordered_pause = False
        rig.cluster.statuses = [ReplicaStatus("s", "ready", capacity_tokens=capacity)]
        try:
            refused = http.post(COMPLETIONS, json=prompt_body())
        finally:
            rig.cluster.statuses = None
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_paused")


def test_a_scheduler_that_has_not_heard_gets_nothing_while_paused(rig: HttpRig) -> None:
    """One that has just started reports ready; the ingress knows better."""
    rig.cluster.ordered_pause = True
    try:
        with rig.http() as http:
            refused = http.post(COMPLETIONS, json=prompt_body())
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_paused")
            assert http.get("/health").json()["status"] == "paused"
            assert http.get("/health/startup").status_code == 200
    finally:
        rig.cluster.ordered_pause = False


def test_a_paused_server_can_be_flushed(rig: HttpRig) -> None:
    with rig.http() as http:
        http.post(COMPLETIONS, json=prompt_body()).raise_for_status()
        with paused(http):
            assert http.post("/flush_cache").json()["freed_pages"] >= 8


@pytest.mark.parametrize("path", ["/flush_cache", "/pause", "/resume"])
def test_a_scheduler_that_does_not_answer_is_said(rig: HttpRig, path: str) -> None:
    rig.cluster.num_silent = 1
    try:
        with rig.http() as http:
            answer = http.post(path)
    finally:
        rig.cluster.num_silent = 0
        with rig.http() as http:
            http.post("/resume").raise_for_status()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_failed")
    assert "1 of 2 scheduler(s) did not answer" in answer.json()["error"]["message"]


# -- bodies, methods, keys


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile"])
def test_the_fake_engine_cannot_be_profiled(rig: HttpRig, path: str) -> None:
    with rig.http() as http:
        answer = http.post(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_operation")


@pytest.mark.parametrize(
    ("path", "content", "code"),
    [
        ("/flush_cache", b'{"force": 1}', "invalid_type"),
        ("/pause", b'{"abort": "yes"}', "invalid_type"),
        ("/resume", b"[]", "invalid_json"),
        ("/start_profile", b"{", "invalid_json"),
    ],
)
def test_bodies_of_control_routes_are_checked(rig: HttpRig, path: str, content: bytes, code: str) -> None:
    with rig.http() as http:
        answer = http.post(path, content=content, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


def test_a_body_of_a_control_route_must_be_declared_as_json(rig: HttpRig) -> None:
    with rig.http() as http:
        assert http.post("/flush_cache", content=b"{}").status_code == 415
        assert http.post("/flush_cache", content=b"", headers={"content-type": "text/plain"}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/abort", "/flush_cache", "/resume"])
def test_unknown_fields_of_control_routes_are_reported(rig: HttpRig, path: str) -> None:
    fields = {"all": True} if path == "/v1/abort" else {}
    with rig.http() as http:
        answer = http.post(path, json={**fields, "zzz": 1, "profile_dir": "/etc"})
    assert (answer.status_code, answer.headers["x-ignored-fields"]) == (200, "zzz,profile_dir")


@pytest.fixture(scope="module")
def strict() -> Iterator[HttpRig]:
    with http_rig(FAKE, strict_fields=True, admin_api_keys=("key",), health_generate=True) as rig:
        yield rig


@pytest.mark.parametrize("path", CONTROL_PATHS)
def test_every_control_route_needs_a_key_takes_post_and_is_strict_if_configured(strict: HttpRig, path: str) -> None:
    with strict.http() as http:
        assert http.post(path, json={}).status_code == 401
        http.headers["authorization"] = "Bearer key"
        wrong_method = http.get(path)
        assert (wrong_method.status_code, wrong_method.headers["allow"]) == (405, "POST")
        unknown = (
            http.post(path, json={"all": True, "zzz": 1}) if path == "/v1/abort" else http.post(path, json={"z": 1})
        )
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (400, "unknown_parameter")
        assert unknown.json()["error"]["param"] in ("z", "zzz")


# -- /health/generate


def test_health_generate_is_off_by_default(rig: HttpRig) -> None:
    with rig.http() as http:
        answer = http.get("/health/generate")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")
    assert "health_generate" in answer.json()["error"]["message"]


def counted(rig: HttpRig) -> dict[tuple[str, str], float]:
    """Everything about requests and tokens that a scrape of the application shows."""
    exposition = rig.worker.metrics_snapshot() + rig.do(rig.frontend.metrics_snapshot)
    names = ("overlap_requests_", "overlap_request_", "overlap_prompt_", "overlap_generation_", "overlap_prefix_")
    more = ("overlap_time_to_first", "overlap_inter_token", "overlap_e2e_", "overlap_open_")
    return {(n, str(labels)): v for n, labels, v in samples(exposition) if n.startswith((*names, *more))}


def num_steps(rig: HttpRig) -> float:
    """As of the last time that the loop has published its numbers."""
    return sum(v for n, _, v in samples(rig.worker.metrics_snapshot()) if n == "overlap_step_tokens_count")


def test_health_generate_makes_a_token_that_nothing_counts(strict: HttpRig) -> None:
    before = counted(strict)
    with strict.http() as http:
        for _ in range(3):
            answer = http.get("/health/generate")
            assert (answer.status_code, answer.json()["status"]) == (200, "ready")
            assert 0 < answer.json()["generate_s"] < 10
        head = http.head("/health/generate")
        assert (head.status_code, head.content) == (200, b"")
    strict.until(lambda: num_steps(strict) >= 4, "the steps of four tokens are counted")
    strict.assert_at_rest()
    assert counted(strict) == before


def test_health_generate_needs_a_key_where_the_model_does() -> None:
    with http_rig(FAKE, api_keys=("key",), health_generate=True) as rig, rig.http() as http:
        assert http.get("/health/generate").status_code == 401
        assert http.get("/health/generate", headers={"api-key": "key"}).status_code == 200


def test_health_generate_goes_before_what_waits() -> None:
    with http_rig(FAKE, health_generate=True, max_running_requests=1) as rig, rig.http() as http:
        bodies = [prompt_body(max_tokens=150, prompt=[65 + i]) for i in range(12)]
        posts = [RawPost(rig, COMPLETIONS, body) for body in bodies]
        rig.until(lambda: rig.frontend.num_open == 12, "all are accepted")
        assert http.get("/health/generate").status_code == 200
        assert rig.frontend.num_open >= 10
        assert http.post("/v1/abort", json={"all": True}).json()["aborted"] >= 10
        for post in posts:
            post.leave()


def test_health_generate_is_503_when_no_token_comes_in_time() -> None:
    with http_rig(FAKE, health_generate=True, ready_stall_s=0.2) as rig, rig.http() as http:
        with rig.calls.nowhere():
            answer = http.get("/health/generate")
        assert (answer.status_code, answer.json()["status"]) == (503, "stalled")
        assert answer.json()["generate_s"] is None and answer.headers["retry-after"]
        with paused(http):
            assert http.get("/health/generate").json()["status"] == "paused"
        assert http.get("/health/generate").status_code == 200


def test_probes_that_come_together_share_one_token() -> None:
    answers: list[Any] = []
    with http_rig(FakeModel(base_ms=500.0, max_model_len=64), health_generate=True) as rig:

        def ask() -> None:
            with rig.http() as http:
                answers.append(http.get("/health/generate").status_code)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rig.assert_at_rest()
        rig.until(lambda: num_steps(rig) > 0, "the step of the token is counted")
        assert num_steps(rig) == 1
    assert answers == [200] * 4
