"""What the ingress says of itself: health by the state of schedulers, one exposition for all processes, counters that add up."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from overlap_serve.config import FakeModel
from overlap_serve.messages import AbortRequest, ReplicaStatus, TokenOutput
from overlap_serve.transport import Outbox
from tests.http.raw import CHAT, RawPost, chat_body
from tests.http_rig import KEY, HttpRig, http_rig, samples

FAKE = FakeModel(base_ms=2.0, max_model_len=4096)
CONFIG = {"max_running_requests": 128, "kv_cache_tokens": 262_144}

READY = ReplicaStatus("a", "ready", last_step_age_s=0.2, running=3, waiting=1, capacity_tokens=999)


@pytest.mark.parametrize(
    ("statuses", "code", "word"),
    [
        ([READY], 200, "ready"),
        ([ReplicaStatus("b", "stalled", last_step_age_s=20.0), READY], 200, "ready"),
        ([], 503, "loading"),
        ([ReplicaStatus("b", "loading")], 503, "loading"),
        ([ReplicaStatus("b", "paused")], 503, "paused"),
        ([ReplicaStatus("b", "draining"), ReplicaStatus("c", "dead")], 503, "draining"),
        ([ReplicaStatus("b", "stalled")], 503, "stalled"),
        ([ReplicaStatus("b", "dead")], 503, "dead"),
    ],
)
def test_a30_ready_follows_the_best_scheduler_and_live_does_not(
    rig: HttpRig, statuses: list[ReplicaStatus], code: int, word: str
) -> None:
    rig.cluster.statuses = statuses
    try:
        with rig.http() as http:
            for path in ("/health", "/health/ready"):
                response = http.get(path)
                assert (response.status_code, response.json()["status"]) == (code, word)
                assert ("retry-after" in response.headers) == (code == 503)
                head = http.head(path)
                assert (head.status_code, head.content) == (code, b"")
            live = http.get("/health/live")
            assert (live.status_code, live.json()["status"]) == (200, "ready")
            assert len(live.json()["replicas"]) == len(statuses)
    finally:
        rig.cluster.statuses = None


def test_health_body_lists_every_replica_and_sums(rig: HttpRig) -> None:
    rig.cluster.statuses = [READY, ReplicaStatus("b", "ready", last_step_age_s=0.5, running=2, waiting=4)]
    try:
        with rig.http() as http:
            body = http.get("/health").json()
    finally:
        rig.cluster.statuses = None
    assert body == {
        "status": "ready",
        "last_step_age_s": 0.5,
        "running": 5,
        "waiting": 5,
        "replicas": [
            {"replica": "a", "status": "ready", "last_step_age_s": 0.2, "running": 3, "waiting": 1},
            {"replica": "b", "status": "ready", "last_step_age_s": 0.5, "running": 2, "waiting": 4},
        ],
    }


def test_without_a_detokenizer_nothing_is_ready(rig: HttpRig) -> None:
    endpoints, rig.cluster.endpoints = rig.cluster.endpoints, []
    try:
        with rig.http() as http:
            assert http.get("/health/ready").status_code == 503
            assert http.post(CHAT, json=chat_body()).json()["error"]["code"] == "server_loading"
    finally:
        rig.cluster.endpoints = endpoints


def test_a30_dead_scheduler_is_not_ready_and_models_are_still_listed() -> None:
    with http_rig(FAKE) as rig, rig.http() as http:
        assert http.get("/health/ready").status_code == 200
        rig.worker.stop()
        rig.until(lambda: rig.worker.status().status == "dead", "the worker has ended")
        assert (http.get("/health/ready").status_code, http.get("/health/live").status_code) == (503, 200)
        assert http.get("/v1/models").status_code == 200
        refused = http.post(CHAT, json=chat_body())
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_failed")


def test_health_answers_while_many_streams_run(rig: HttpRig) -> None:
    with ExitStack() as stack:
        for _ in range(32):
            stack.enter_context(RawPost(rig, CHAT, chat_body(stream=True, max_tokens=4000)))
        rig.until(lambda: rig.detokenizer.open_streams() == 32, "they stream")
        http = stack.enter_context(rig.http())
        slowest = sorted(http.get("/health").elapsed.total_seconds() for _ in range(40))[-2]
        assert http.get("/health").json()["running"] == 32
    assert slowest < 0.25  # http-api asks for 50 ms; this machine is shared with other tests


def test_metrics_show_every_process_once(rig: HttpRig) -> None:
    with rig.http() as http:
        assert http.post(CHAT, json=chat_body(max_tokens=3)).status_code == 200
        response = http.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = [line for line in response.text.splitlines() if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
    replicas = {labels["replica"] for _, labels, _ in samples(response.content) if "replica" in labels}
    assert replicas == {"ingress-0", "scheduler-0", "detokenizer-0"}
    names = {name for name, _, _ in samples(response.content)}
    assert {
        "overlap_requests_accepted_total",
        "overlap_open_requests",
        "overlap_time_to_first_token_seconds_count",
        "overlap_running_requests",
        "overlap_kv_pages",
        "overlap_detokenizer_open_streams",
        "overlap_transport_messages_total",
        "overlap_build_info",
    } <= names


def test_metrics_are_reused_for_a_moment(rig: HttpRig) -> None:
    """Two scrapes at once cost one round of asking."""
    with rig.http() as http:
        first = http.get("/metrics").text
        assert http.post(CHAT, json=chat_body(max_tokens=1)).status_code == 200
        assert http.get("/metrics").text == first


def test_a29_counters_and_histograms_equal_a_ledger_kept_by_the_test() -> None:
    """60 streams of which 40 are closed at once, 10 refusals."""
    with http_rig(FAKE, **CONFIG) as rig:
        with rig.http() as http:
            for _ in range(10):
                assert http.post(CHAT, json=chat_body(n=0)).status_code == 400
        posts = [RawPost(rig, CHAT, chat_body(stream=True, max_tokens=4000)) for _ in range(40)]
        for post in posts:
            post.read_events(2)

        def finish(_: int) -> None:
            with rig.http() as http:
                assert http.post(CHAT, json=chat_body(max_tokens=20)).json()["usage"]["completion_tokens"] == 20

        with ThreadPoolExecutor(20) as pool:
            list(pool.map(finish, range(20)))
        for post in posts:
            post.leave()
        rig.assert_at_rest()
        values: Counter[str] = Counter()
        for name, labels, value in samples(rig.call(rig.frontend.metrics())):
            kind = next(
                (labels[key] for key in ("reason", "cause", "code", "finished_reason", "state") if key in labels), ""
            )
            values[f"{name}/{kind}"] += int(value)
        assert values["overlap_requests_accepted_total/"] == 60
        assert values["overlap_requests_finished_total/length"] == 20
        assert values["overlap_requests_aborted_total/client"] == 40
        assert values["overlap_requests_rejected_total/integer_below_min_value"] == 10
        assert values["overlap_open_requests/"] == 0
        assert values["overlap_running_requests/"] == 0
        assert values["overlap_waiting_requests/queue"] == 0
        assert values["overlap_detokenizer_open_streams/"] == 0
        assert values["overlap_kv_pages/owned"] == 0
        assert values["overlap_e2e_request_latency_seconds_count/"] == 60
        assert values["overlap_time_to_first_token_seconds_count/"] == 60
        assert values["overlap_request_prompt_tokens_count/abort"] == 40
        assert values["overlap_request_generation_tokens_count/length"] == 20
        assert values["overlap_request_generation_tokens_sum/length"] == 400
        assert values["overlap_request_generation_tokens_sum/abort"] >= 40
        # The histogram's first token is in ttft, every later one in itl: never more samples than tokens.
        assert values["overlap_inter_token_latency_seconds_count/"] >= 19 * 20


def test_identity_holds_at_every_scrape_under_load(rig: HttpRig) -> None:
    done = threading.Event()

    def traffic(seed: int) -> None:
        with RawPost(rig, CHAT, chat_body(stream=True, max_tokens=10 + seed)) as post:
            post.read_events(1000 if seed % 3 else 3)

    def scrape() -> int:
        seen = 0
        while not done.wait(0.02):
            counts = rig.counters()
            assert counts["accepted"] == counts["finished"] + counts["aborted"] + counts["failed"] + counts["open"]
            seen += counts["open"] > 0
        return seen

    with ThreadPoolExecutor(17) as pool:
        scraper = pool.submit(scrape)
        list(pool.map(traffic, range(64)))
        done.set()
        assert scraper.result() > 0


def rejected(rig: HttpRig) -> dict[str, int]:
    """Refused requests by code."""
    text = rig.do(rig.frontend.metrics_snapshot)
    name = "overlap_requests_rejected_total"
    return {labels["code"]: int(value) for found, labels, value in samples(text) if found == name}


def test_a29_what_never_reaches_a_handler_is_counted_as_rejected() -> None:
    """One series for each code, whatever the client writes into keys and paths."""
    keys = {"api_keys": ["user"], "admin_api_keys": ["admin"]}
    with http_rig(FAKE, **keys) as rig, rig.http(headers={"authorization": "Bearer user"}) as http:
        for i in range(3):
            assert http.post(CHAT, json=chat_body(), headers={"authorization": f"Bearer {i}"}).status_code == 401
            assert http.get(f"/v1/nowhere/{i}").status_code == 404
        assert http.post("/v1/abort", json={"all": True}).status_code == 403
        assert http.get(CHAT).status_code == 405
        assert http.post(CHAT, content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
        assert http.get("/health").status_code == http.get("/v1/models").status_code == 200
        assert rejected(rig) == {
            "invalid_api_key": 3,
            "unknown_url": 3,
            "insufficient_permissions": 1,
            "method_not_allowed": 1,
            "unsupported_media_type": 1,
        }
        assert rig.counters()["accepted"] == 0


def total(rig: HttpRig, name: str) -> float:
    """Of one metric, over all processes, read now."""
    expositions = [rig.do(rig.frontend.metrics_snapshot), *rig.call(rig.cluster.metric_snapshots())]
    return sum(value for text in expositions for found, _, value in samples(text) if found == name)


def eventually(holds: Callable[[], bool]) -> None:
    """Other threads count; asked from the test's own, because the event loop has to answer."""
    pause = threading.Event()
    assert any(holds() or pause.wait(0.01) for _ in range(500))


def test_payloads_with_a_wrong_key_are_refused_and_counted(rig: HttpRig) -> None:
    before = total(rig, "overlap_transport_refused_total")
    stranger = Outbox(b"another application", "test")
    for endpoint in (rig.frontend.endpoint, rig.worker.endpoint, rig.detokenizer.endpoint):
        stranger.send(endpoint, [AbortRequest("r", "client")])
    eventually(lambda: total(rig, "overlap_transport_refused_total") == before + 3)
    stranger.close()


def test_outputs_that_come_too_late_are_dropped_and_counted(rig: HttpRig) -> None:
    name = "overlap_detokenizer_late_outputs_total"
    before = total(rig, name)
    outbox = Outbox(KEY, "test")
    outbox.send(rig.detokenizer.endpoint, [TokenOutput("nobody", 0, 0, 1, (65,))])
    eventually(lambda: total(rig, name) == before + 1)
    outbox.close()


def test_a29_pages_of_an_engine_that_has_had_no_request_add_up() -> None:
    with http_rig(FAKE) as rig:
        pages = {
            labels["state"]: value
            for name, labels, value in samples(rig.worker.metrics_snapshot())
            if name == "overlap_kv_pages"
        }
        assert pages["owned"] == pages["cached"] == 0
        assert pages["free"] * 16 >= rig.worker.capacity_tokens > 0
