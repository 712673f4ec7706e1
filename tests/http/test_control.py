"""Control routes and what is beside the API proper: admin keys, abort everywhere, load, startup; token budget edges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from overlap_serve.config import FakeModel, ServeConfig
from overlap_serve.messages import ReplicaStatus
from tests.http.raw import CHAT, COMPLETIONS, RawPost, chat_body, completion_body
from tests.http_rig import HttpRig, http_rig

M = 128
FAKE = FakeModel(base_ms=1.0, max_model_len=M)
USER, ADMIN = "key-user", "key-admin"


def keyed(user: bool, admin: bool) -> dict[str, Any]:
    return {"api_keys": (USER,) if user else (), "admin_api_keys": (ADMIN,) if admin else ()}


@pytest.fixture(scope="module", params=[(False, False), (True, False), (False, True), (True, True)])
def keys(request: pytest.FixtureRequest) -> Iterator[tuple[HttpRig, bool, bool]]:
    with http_rig(FAKE, **keyed(*request.param)) as rig:
        yield rig, *request.param


@pytest.mark.parametrize("sent", [None, "wrong", USER, ADMIN])
def test_who_may_use_the_model_and_who_may_control(keys: tuple[HttpRig, bool, bool], sent: str | None) -> None:
    """Without any key everything is open; with any, control needs an admin key; admin keys are good everywhere."""
    rig, user, admin = keys
    known = {USER: user, ADMIN: admin}.get(sent or "", False)
    headers = {} if sent is None else {"authorization": f"Bearer {sent}"}
    with rig.http() as http:
        use = http.post(CHAT, json=chat_body(max_tokens=1), headers=headers)
        control = http.post("/v1/abort", json={"all": True}, headers=headers)
    assert use.status_code == (200 if not user or known else 401)
    expected = 200 if not (user or admin) or (sent == ADMIN and admin) else 403 if known else 401
    assert control.status_code == expected
    if expected == 403:
        error = control.json()["error"]
        assert (error["type"], error["code"]) == ("permission_error", "insufficient_permissions")
        assert "x-request-id" in control.headers


def test_abort_reaches_the_other_ingress_replicas(rig: HttpRig) -> None:
    rig.cluster.asked_to_abort.clear()
    rig.cluster.aborted_elsewhere = 3
    try:
        with rig.http() as http:
            assert http.post("/v1/abort", json={"request_id": "mine"}).json() == {"aborted": 3}
            with RawPost(rig, CHAT, chat_body(stream=True, ignore_eos=True), x_request_id="mine") as stream:
                stream.read_events(2)
                assert http.post("/v1/abort", json={"request_id": "mine"}).json() == {"aborted": 4}
                stream.read_events(10**6)
            assert http.post("/v1/abort", json={"all": True}).json() == {"aborted": 3}
    finally:
        rig.cluster.aborted_elsewhere = 0
    assert b'"stop_reason":"client_abort"' in stream.received
    assert rig.cluster.asked_to_abort == ["mine", "mine", None]


def test_load_adds_up_what_the_schedulers_say(rig: HttpRig) -> None:
    rig.cluster.statuses = [
        ReplicaStatus("s", "ready", running=3, waiting=1, kv_usage=0.25),
        ReplicaStatus("t", "ready", running=2, waiting=0, kv_usage=0.5),
    ]
    try:
        with rig.http() as http:
            load = http.get("/load").json()
    finally:
        rig.cluster.statuses = None
    assert load == {"server_load": 6, "running": 5, "waiting": 1, "kv_usage": 0.5}


def test_startup_is_503_until_first_ready_and_200_ever_after() -> None:
    with http_rig(FAKE) as rig, rig.http() as http:
        rig.cluster.statuses = [ReplicaStatus("s", "loading")]
        rig.do(lambda: setattr(rig.frontend, "_was_ready", False))  # the rig was up before this test could look
        first = http.get("/health/startup")
        assert (first.status_code, first.json()["status"]) == (503, "loading")
        rig.cluster.statuses = None
        assert http.get("/health/startup").status_code == 200
        rig.cluster.statuses = [ReplicaStatus("s", "stalled")]
        assert http.get("/health/startup").status_code == 200
        assert http.get("/health").status_code == 503
        assert http.head("/health/startup").status_code == 200
        rig.cluster.statuses = None


@pytest.mark.parametrize("capacity", [32, 33, 64])
@pytest.mark.parametrize("stream", [False, True])
def test_a2_a_cache_smaller_than_the_context_has_one_defined_answer_at_each_edge(capacity: int, stream: bool) -> None:
    """C < M: P + 1 > C is refused at once; what fits runs to the end of the cache with `length`."""
    with http_rig(FAKE, kv_cache_tokens=capacity, page_size=1) as rig, rig.http() as http:
        for prompt in (1, capacity - 2, capacity - 1, capacity, capacity + 1, M - 1, M, M + 1):
            for limit in (None, 1, 5):
                body = completion_body(prompt=[65] * prompt, ignore_eos=True, stream=stream, max_tokens=limit or 60)
                response = http.post(COMPLETIONS, json=body)
                fits = prompt + 1 <= capacity and prompt + (limit or 60) <= M
                assert response.status_code == (200 if fits else 400), (prompt, limit)
                if not fits:
                    assert response.json()["error"]["code"] == "context_length_exceeded"
                elif not stream:
                    answer = response.json()
                    assert answer["choices"][0]["finish_reason"] == "length"
                    assert answer["usage"]["completion_tokens"] == min(limit or 60, capacity - prompt)


def test_a_model_whose_name_has_a_slash_is_found_raw_and_escaped() -> None:
    rig = HttpRig(ServeConfig(engine="fake", served_model_name="org/name", fake=FAKE))
    rig.start()
    try:
        with rig.openai() as client, rig.http() as http:
            assert client.models.retrieve("org/name").id == "org/name"
            assert http.get("/v1/models/org%2Fname").json()["id"] == "org/name"
            assert http.get("/v1/models/org/name").json()["id"] == "org/name"
            with pytest.raises(openai.NotFoundError):
                client.models.retrieve("org")
            with pytest.raises(openai.BadRequestError) as caught:
                client.embeddings.create(model="org/name", input="x")
            assert (caught.value.code, caught.value.param) == ("unsupported_operation", "model")
            answer: Any = client.chat.completions.create(
                model="org/name", messages=[{"role": "user", "content": "x"}], max_tokens=1
            )
            assert answer.model == "org/name"
        rig.assert_at_rest()
    finally:
        rig.stop()
