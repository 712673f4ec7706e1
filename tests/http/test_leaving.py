"""Requests that end early: clients that leave, aborts by id, deadlines, readers that stop reading, shutdown.

Every test ends with the rig at rest: no page, slot, stream, call or detokenizer state is left, and the counters add up.
"""

from __future__ import annotations

import json
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from overlap_serve.config import FakeModel
from overlap_serve.runtime import frontend
from tests.http.raw import CHAT, COMPLETIONS, RawPost, chat_body, completion_body
from tests.http_rig import HttpRig, http_rig, samples

FAKE = FakeModel(base_ms=4.0, max_model_len=4096)
CONFIG = {"max_running_requests": 8, "max_step_tokens": 64, "kv_cache_tokens": 8192}
LONG = 3000  # tokens; 12 s: whoever waits for the end fails the test's limits


def aborted(rig: HttpRig) -> dict[str, float]:
    """Aborted requests by cause."""
    text = rig.do(rig.frontend.metrics_snapshot)
    return {labels["cause"]: value for name, labels, value in samples(text) if name == "overlap_requests_aborted_total"}


@pytest.mark.parametrize("num_events", [0, 1, 5])
@pytest.mark.parametrize("n", [1, 3])
def test_a7_streaming_client_that_leaves_frees_everything(rig: HttpRig, num_events: int, n: int) -> None:
    before = rig.counters()
    post = RawPost(rig, CHAT, chat_body(stream=True, max_tokens=LONG, n=n, temperature=1))
    if num_events == 0:
        rig.until(lambda: rig.frontend.num_open == 1, "the request is open")
    post.read_events(num_events)
    post.leave()
    rig.assert_at_rest()
    after = rig.counters()
    assert (after["accepted"], after["aborted"]) == (before["accepted"] + 1, before["aborted"] + 1)


@pytest.mark.parametrize("started", [False, True])
def test_a7_client_that_does_not_stream_and_leaves_frees_everything(rig: HttpRig, started: bool) -> None:
    before = aborted(rig).get("client", 0)
    post = RawPost(rig, COMPLETIONS, completion_body(max_tokens=LONG))
    rig.until(lambda: rig.frontend.num_open == 1, "the request is open")
    if started:
        rig.until(lambda: rig.detokenizer.open_streams() == 1, "tokens flow")
    post.leave()
    rig.assert_at_rest()
    assert aborted(rig)["client"] == before + 1


def test_a7_client_that_leaves_stops_the_engine_within_a_few_steps(rig: HttpRig) -> None:
    with RawPost(rig, CHAT, chat_body(stream=True, max_tokens=LONG)) as post:
        post.read_events(3)
    rig.assert_at_rest()
    generated = {name: value for name, _, value in samples(rig.worker.metrics_snapshot())}
    with RawPost(rig, CHAT, chat_body(stream=True, max_tokens=LONG)) as post:
        post.read_events(3)
    rig.assert_at_rest()
    more = {name: value for name, _, value in samples(rig.worker.metrics_snapshot())}
    name = "overlap_generation_tokens_total"
    assert more[name] - generated[name] < 25  # 3 read, some on their way; 4 ms each


def test_a7_clients_in_the_queue_leave_it(rig: HttpRig) -> None:
    """More requests than the engine runs at once: the rest wait, and their clients go too."""
    posts = [RawPost(rig, COMPLETIONS, completion_body(max_tokens=LONG, stream=i % 2 == 0)) for i in range(20)]
    rig.until(lambda: rig.frontend.num_open == 20 and rig.worker.status().waiting == 12, "12 wait")
    for post in posts:
        post.leave()
    rig.assert_at_rest()
    assert rig.worker.status().waiting == 0


def test_a7_client_that_leaves_in_the_middle_of_its_prompt(rig: HttpRig) -> None:
    post = RawPost(rig, COMPLETIONS, completion_body(prompt=[65] * 3500, max_tokens=100))  # 55 chunks of prefill
    rig.until(lambda: rig.worker.status().running == 1, "it is in prefill")
    post.leave()
    rig.assert_at_rest()


def test_client_that_leaves_while_it_sends_its_body_costs_nothing(rig: HttpRig) -> None:
    before = rig.counters()
    with socket.create_connection(("127.0.0.1", rig.port)) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"
        )
    with rig.http() as http:
        assert http.post(COMPLETIONS, json=completion_body(max_tokens=1)).status_code == 200
    assert rig.counters()["accepted"] == before["accepted"] + 1


def test_32_clients_of_which_a_fifth_leave_at_random(rig: HttpRig) -> None:
    rng = random.Random(7)
    plans = [(rng.random() < 0.2, rng.randrange(1, 12), rng.randrange(15, 40)) for _ in range(96)]
    before = rig.counters()

    def client(plan: tuple[bool, int, int]) -> None:
        leaves, num_events, max_tokens = plan
        with RawPost(rig, CHAT, chat_body(stream=True, max_tokens=max_tokens, temperature=1)) as post:
            post.read_events(num_events if leaves else 10_000)
            assert leaves or post.received.count(b"data: [DONE]") == 1

    def read_all(plan: tuple[bool, int, int]) -> None:
        if plan[0]:
            client(plan)
            return
        with rig.http() as http:
            raw = http.post(CHAT, json=chat_body(stream=True, max_tokens=plan[2], temperature=1)).content
        assert raw.endswith(b"data: [DONE]\n\n") and raw.count(b'"finish_reason":"length"') == 1

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(read_all, plans))
    rig.assert_at_rest()
    after = rig.counters()
    leavers = sum(leaves for leaves, _, _ in plans)
    assert after["accepted"] - before["accepted"] == 96
    assert after["failed"] == before["failed"]
    # One that leaves with the last tokens already here has finished.
    assert 0 < after["aborted"] - before["aborted"] <= leavers


def post_in_thread(rig: HttpRig, body: dict[str, Any], label: str) -> tuple[threading.Thread, list[httpx.Response]]:
    answers: list[httpx.Response] = []

    def send() -> None:
        with rig.http() as http:
            answers.append(http.post(CHAT, json=body, headers={"x-request-id": label}))

    thread = threading.Thread(target=send)
    thread.start()
    return thread, answers


def test_a6_abort_by_id_ends_all_requests_with_that_label(rig: HttpRig) -> None:
    sent = [post_in_thread(rig, chat_body(max_tokens=LONG, stream=i % 2 == 0), "mine") for i in range(6)]
    other, other_answer = post_in_thread(rig, chat_body(max_tokens=30), "other")
    rig.until(lambda: rig.detokenizer.open_streams() >= 6, "tokens flow")
    with rig.http() as http:
        assert http.post("/v1/abort", json={"request_id": "unknown"}).json() == {"aborted": 0}
        assert http.post("/v1/abort", json={"request_id": "mine"}).json() == {"aborted": 6}
    for index, (thread, answers) in enumerate(sent):
        thread.join()
        [answer] = answers
        assert answer.status_code == 200
        if index % 2 == 0:
            assert answer.text.count('"finish_reason":"abort","stop_reason":"client_abort"') == 1
            assert answer.text.endswith("data: [DONE]\n\n")
        else:
            [choice] = answer.json()["choices"]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", "client_abort")
            assert answer.json()["usage"]["completion_tokens"] == len(choice["message"]["content"]) > 0
    other.join()
    assert other_answer[0].json()["choices"][0]["finish_reason"] == "length"
    assert aborted(rig)["api"] >= 6


@pytest.mark.parametrize("stream", [False, True])
def test_abort_before_any_output_is_409_and_not_retried(rig: HttpRig, stream: bool) -> None:
    body = completion_body(prompt=[66] * 3900, max_tokens=9, stream=stream)  # 61 chunks of prefill at 4 ms
    answers: list[httpx.Response] = []

    def send() -> None:
        with rig.http() as http:
            answers.append(http.post(COMPLETIONS, json=body, headers={"x-request-id": "early"}))

    thread = threading.Thread(target=send)
    thread.start()
    rig.until(lambda: rig.worker.status().running == 1, "it is in prefill")
    with rig.http() as http:
        assert http.post("/v1/abort", json={"all": True}).json() == {"aborted": 1}
    thread.join()
    assert answers[0].status_code == 409
    assert answers[0].headers["x-should-retry"] == "false"
    assert answers[0].json()["error"]["code"] == "request_aborted"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({}, "missing_required_parameter"),
        ({"all": False}, "missing_required_parameter"),
        ({"all": True, "request_id": "x"}, "missing_required_parameter"),
        ({"request_id": 5}, "invalid_type"),
        ({"all": "yes"}, "invalid_type"),
    ],
)
def test_abort_needs_an_id_or_all(rig: HttpRig, body: dict[str, Any], code: str) -> None:
    with rig.http() as http:
        response = http.post("/v1/abort", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, code)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_header", [False, True])
def test_deadline_with_output_ends_with_abort_and_what_there_is(rig: HttpRig, stream: bool, by_header: bool) -> None:
    fields: dict[str, Any] = {} if by_header else {"timeout_s": 0.15}
    headers = {"x-request-timeout-ms": "150"} if by_header else {}
    with rig.http() as http:
        body = chat_body(max_tokens=LONG, stream=stream, **fields)
        response = http.post(CHAT, json=body, headers=headers)
    assert response.status_code == 200
    if stream:
        assert response.text.count('"finish_reason":"abort","stop_reason":"deadline"') == 1
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        [choice] = response.json()["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", "deadline")
        assert 0 < response.json()["usage"]["completion_tokens"] < 60


@pytest.mark.parametrize("stream", [False, True])
def test_deadline_before_output_is_408_and_not_retried(rig: HttpRig, stream: bool) -> None:
    body = completion_body(prompt=[67] * 3900, max_tokens=9, stream=stream, timeout_s=0.08)
    before = aborted(rig).get("deadline", 0)
    with rig.http() as http:
        response = http.post(COMPLETIONS, json=body)
    assert response.status_code == 408
    assert response.headers["x-should-retry"] == "false"
    assert (response.json()["error"]["type"], response.json()["error"]["code"]) == (
        "timeout_error",
        "deadline_exceeded",
    )
    assert aborted(rig)["deadline"] == before + 1


def test_reader_that_stops_reading_is_aborted() -> None:
    fast = FakeModel(base_ms=0.2, max_model_len=65536)
    config = {"slow_client_timeout": 0.3, "max_n": 64, "max_running_requests": 64}
    with http_rig(fast, **config) as rig, socket.create_connection(("127.0.0.1", rig.port)) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        data = json.dumps(
            chat_body(stream=True, max_tokens=60_000, n=64, temperature=1, return_token_ids=True)
        ).encode()
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        client.sendall(head.encode() + data)
        rig.until(lambda: rig.frontend.num_open == 1, "it is open")
        rig.until(lambda: rig.frontend.num_open == 0, "it is given up, with the connection still there")
        assert aborted(rig) == {"client": 1}


def test_detokenizer_that_goes_away_fails_its_streams_with_an_error_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend, "WATCH_S", 0.02)
    with http_rig(FAKE) as rig:
        thread, answers = post_in_thread(rig, chat_body(max_tokens=LONG, stream=True), "a")
        rig.until(lambda: rig.detokenizer.open_streams() == 1, "tokens flow")
        rig.cluster.endpoints = []
        thread.join()
        last, done, rest = answers[0].text.split("\n\n")[-3:]
        assert (done, rest) == ("data: [DONE]", "")
        error = json.loads(last.removeprefix("data: "))["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["code"] == "engine_failed"
        assert '"finish_reason":"' not in answers[0].text, "no finish chunk before an error"
        assert rig.counters()["failed"] == 1


def test_shutdown_ends_streams_with_a_terminal_event_and_then_refuses() -> None:
    with http_rig(FAKE) as rig:
        thread, answers = post_in_thread(rig, chat_body(max_tokens=LONG, stream=True), "a")
        rig.until(lambda: rig.detokenizer.open_streams() == 1, "tokens flow")
        rig.do(rig.frontend.drain)
        with rig.http() as http:
            refused = http.post(CHAT, json=chat_body())
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_draining")
            assert http.get("/health/ready").status_code == 503
            assert http.get("/health/live").status_code == 200
        assert rig.frontend.num_open == 1, "what is open goes on"
        rig.worker.stop(drain_s=0.0)
        thread.join()
        assert answers[0].text.count('"finish_reason":"abort","stop_reason":"shutdown"') == 1
        assert answers[0].text.endswith("data: [DONE]\n\n")
        assert aborted(rig) == {"shutdown": 1}
