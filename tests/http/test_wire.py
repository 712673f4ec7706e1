"""Bytes and headers on the wire: event framing, request ids, keys, ignored fields, schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from overlap_serve import __version__
from overlap_serve.config import FakeModel
from tests.http.raw import CHAT, COMPLETIONS, RawPost, chat_body, completion_body
from tests.http_rig import MODEL, HttpRig, http_rig

FAST = FakeModel(base_ms=1.0, max_model_len=256)


def events_of(raw: bytes) -> list[Any]:
    """Checks the framing of http-api section 1; the parsed events without [DONE]."""
    assert raw.endswith(b"data: [DONE]\n\n")
    blocks = raw.removesuffix(b"data: [DONE]\n\n").split(b"\n\n")
    assert blocks.pop() == b""
    assert all(block.startswith(b"data: ") and b"\n" not in block for block in blocks)
    return [json.loads(block.removeprefix(b"data: ")) for block in blocks]


def test_event_stream_has_its_headers_and_frames(rig: HttpRig) -> None:
    with rig.http() as http:
        response = http.post(CHAT, json=chat_body(stream=True, max_tokens=4))
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers
    events = events_of(response.content)
    assert {(e["id"], e["created"], e["model"], e["system_fingerprint"], e["object"]) for e in events} == {
        (events[0]["id"], events[0]["created"], MODEL, events[0]["system_fingerprint"], "chat.completion.chunk")
    }
    assert events[0]["id"].startswith("chatcmpl-") and events[0]["system_fingerprint"].startswith("fp_")
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("usage" not in event for event in events)
    assert all("role" not in event["choices"][0]["delta"] for event in events[1:])
    last = events[-1]["choices"][0]
    assert (last["delta"], last["finish_reason"], last["stop_reason"]) == ({}, "length", None)
    assert all(event["choices"][0]["delta"]["content"] for event in events[1:-1]), "no empty chunks"


def test_usage_is_null_on_every_chunk_and_numbers_on_the_last(rig: HttpRig) -> None:
    body = completion_body(stream=True, max_tokens=3, n=2, stream_options={"include_usage": True})
    with rig.http() as http:
        events = events_of(http.post(COMPLETIONS, json=body).content)
    assert all(event["usage"] is None and len(event["choices"]) == 1 for event in events[:-1])
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 6
    assert all(event["object"] == "text_completion" and event["id"].startswith("cmpl-") for event in events)
    assert [e["choices"][0]["index"] for e in events[:-1] if e["choices"][0]["finish_reason"]] == [0, 1]


def test_return_token_ids_reach_the_stream(rig: HttpRig) -> None:
    with rig.http() as http:
        whole = http.post(CHAT, json=chat_body(max_tokens=5, return_token_ids=True)).json()
        events = events_of(http.post(CHAT, json=chat_body(max_tokens=5, return_token_ids=True, stream=True)).content)
    assert [e["prompt_token_ids"] for e in events if "prompt_token_ids" in e] == [whole["prompt_token_ids"]]
    ids = [token for event in events for token in event["choices"][0].get("token_ids", [])]
    assert ids == whole["choices"][0]["token_ids"] and len(ids) == 5


@pytest.mark.parametrize("given", ["a", "A.b:c-d_9", "x" * 128])
def test_good_request_id_comes_back(rig: HttpRig, given: str) -> None:
    with rig.http() as http:
        assert http.get("/v1/models", headers={"x-request-id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "\u00e9".encode().decode("latin-1"), 'a"b', None])
def test_bad_or_missing_request_id_is_replaced(rig: HttpRig, given: str | None) -> None:
    headers = {} if given is None else {b"x-request-id": given.encode("latin-1")}
    with rig.http() as http:
        made = {http.get("/nope", headers=headers).headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2 and all(label.startswith("req-") for label in made)


def test_request_id_of_the_body_is_the_label_unless_it_is_bad(rig: HttpRig) -> None:
    with rig.http() as http:
        good = http.post(CHAT, json=chat_body(max_tokens=1, request_id="from-body"), headers={"x-request-id": "h"})
        assert good.headers["x-request-id"] == "from-body"
        alias = http.post(CHAT, json=chat_body(max_tokens=1, rid="from-rid", stream=True))
        assert alias.headers["x-request-id"] == "from-rid"
        bad = http.post(CHAT, json=chat_body(max_tokens=1, request_id="not\nvalid"), headers={"x-request-id": "h"})
        assert (bad.status_code, bad.headers["x-request-id"]) == (200, "h")


@pytest.mark.parametrize("stream", [False, True])
def test_ignored_fields_are_reported_safely_and_counted(rig: HttpRig, stream: bool) -> None:
    body = chat_body(max_tokens=1, stream=stream, store=True, zzz=1, **{"a\r\nset-cookie: x": 1})
    with rig.http() as http:
        response = http.post(CHAT, json=body)
        assert response.headers["x-ignored-fields"].split(",") == ["store", "zzz", "other"]
        assert "set-cookie" not in response.headers
        assert "x-ignored-fields" not in http.post(CHAT, json=chat_body(max_tokens=1)).headers
    text = rig.do(rig.frontend.metrics_snapshot).decode()
    assert 'overlap_ignored_request_fields_total{field="store"' in text
    assert 'field="zzz"' not in text and 'field="other"' in text


def test_strict_fields_refuses_what_is_unknown() -> None:
    with http_rig(FAST, strict_fields=True) as rig, rig.http() as http:
        response = http.post(CHAT, json=chat_body(zzz=1))
        assert (response.status_code, response.json()["error"]["code"]) == (400, "unknown_parameter")
        assert http.post(CHAT, json=chat_body(max_tokens=1, store=True)).status_code == 200


KEYED: dict[str, Any] = {"api_keys": ("key-one", "key-two")}


def test_keys_guard_every_route_except_health() -> None:
    with http_rig(FAST, **KEYED) as rig, rig.http() as http:
        for method, path in (
            ("POST", CHAT),
            ("GET", "/v1/models"),
            ("GET", "/docs"),
            ("GET", "/nope"),
            ("POST", "/v1/abort"),
        ):
            response = http.request(method, path)
            assert response.status_code == 401, path
            assert response.headers["www-authenticate"] == "Bearer" and response.headers["x-request-id"]
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.json()["error"]["type"] == "authentication_error"
        for path in ("/health", "/health/live", "/health/ready", "/metrics", "/version"):
            assert http.get(path).status_code == 200, path


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("authorization", "Bearer key-one", 200),
        ("authorization", "bearer key-two", 200),
        ("api-key", "key-one", 200),
        ("x-api-key", "key-two", 200),
        ("authorization", "Bearer key-on", 401),
        ("authorization", "Bearer", 401),
        ("authorization", "key-one", 401),
        ("authorization", "Basic key-one", 401),
        ("api-key", "", 401),
        ("api-key", "\u00e9".encode().decode("latin-1"), 401),
    ],
)
def test_key_is_taken_from_any_of_three_headers(keyed: HttpRig, name: str, value: str, status: int) -> None:
    with keyed.http() as http:
        assert http.get("/v1/models", headers={name.encode(): value.encode("latin-1")}).status_code == status


@pytest.fixture(scope="module")
def keyed() -> Any:
    with http_rig(FAST, protect_metrics=True, **KEYED) as rig:
        yield rig


def test_protect_metrics_guards_metrics_and_version(keyed: HttpRig) -> None:
    with keyed.http() as http:
        assert [http.get(path).status_code for path in ("/metrics", "/version", "/health")] == [401, 401, 200]
        assert http.get("/metrics", headers={"api-key": "key-one"}).status_code == 200


def test_without_keys_any_key_passes(rig: HttpRig) -> None:
    with rig.http() as http:
        assert http.get("/v1/models", headers={"authorization": "Bearer whatever"}).status_code == 200


def test_ping_comments_keep_a_silent_stream_open() -> None:
    slow = FakeModel(base_ms=300.0, max_model_len=256)
    with http_rig(slow, sse_ping_s=0.05) as rig, rig.http() as http:
        raw = http.post(CHAT, json=chat_body(stream=True, max_tokens=2)).content
    assert raw.startswith(b"data: "), "nothing before the first output: the status line waits for it"
    assert raw.count(b": keep-alive\n\n") >= 3
    events_of(raw.replace(b": keep-alive\n\n", b""))


def test_everything_queued_for_a_stream_leaves_in_one_write(rig: HttpRig) -> None:
    """Role and first text are two events of one delta: they arrive in one chunk of the transfer encoding."""
    with RawPost(rig, CHAT, chat_body(stream=True, max_tokens=1)) as post:
        post.read_events(3)
        body = post.received.partition(b"\r\n\r\n")[2]
    size, _, rest = body.partition(b"\r\n")
    first = rest[: int(size, 16)]
    assert first.count(b"data: ") >= 2


def test_stream_interval_coalesces_all_but_the_first_output() -> None:
    with http_rig(FAST, stream_interval_ms=60.0) as rig, rig.http() as http:
        raw = http.post(CHAT, json=chat_body(stream=True, max_tokens=100)).content
        whole = http.post(CHAT, json=chat_body(max_tokens=100)).json()
    texts = [event["choices"][0]["delta"].get("content", "") for event in events_of(raw)]
    assert "".join(texts) == whole["choices"][0]["message"]["content"]
    pieces = [text for text in texts if text]
    assert len(pieces[0]) < 10 and len(pieces) < 30


def test_schema_documents_the_requests(rig: HttpRig) -> None:
    with rig.http() as http:
        schema = http.get("/openapi.json").json()
        assert http.get("/docs").status_code == 200
        assert http.get("/version").json() == {"version": __version__, "commit": None}
    assert set(schema["paths"]) == {
        *(CHAT, COMPLETIONS, "/v1/models", "/v1/models/{model}", "/v1/abort", "/v1/embeddings"),
        *("/flush_cache", "/pause", "/resume", "/start_profile", "/stop_profile"),
        *("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"),
        *("/health", "/health/ready", "/health/live", "/health/startup", "/version", "/metrics", "/load"),
    }
    schemas = schema["components"]["schemas"]
    body = schema["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatRequest"}
    assert {"messages", "temperature", "stream", "max_tokens"} <= set(schemas["ChatRequest"]["properties"])

    def references(node: Any) -> set[str]:
        if isinstance(node, dict):
            own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
            return own.union(*map(references, node.values()))
        return set().union(*map(references, node)) if isinstance(node, list) else set()

    assert references(schema) <= {f"#/components/schemas/{name}" for name in schemas}
