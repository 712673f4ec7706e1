"""Every refusal of http-api section 13 that HTTP can produce here: status, envelope, string code; and the next request works."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from overlap_serve.config import FAKE_VOCAB_SIZE, FakeModel
from overlap_serve.messages import ReplicaStatus
from tests.http.raw import CHAT, COMPLETIONS, chat_body, completion_body
from tests.http_rig import HttpRig, http_rig

M = 256  # max_model_len
FAKE = FakeModel(base_ms=1.0, max_model_len=M)
CONFIG = {"max_body_bytes": 200_000}


def check_envelope(response: httpx.Response, status: int, kind: str, code: str, param: str | None) -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert set(response.json()) == {"error"} and set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"], error["param"]) == (kind, code, param)
    assert "Traceback" not in error["message"] and ".py" not in error["message"]


def check_works(http: httpx.Client) -> None:
    assert http.post(CHAT, json=chat_body(max_tokens=1)).status_code == 200


BAD_FIELDS: list[tuple[str, dict[str, Any], str, str | None]] = [
    (CHAT, {"messages": None}, "missing_required_parameter", "messages"),
    (COMPLETIONS, {"prompt": None}, "missing_required_parameter", "prompt"),
    (CHAT, {"messages": {}}, "invalid_type", "messages"),
    (CHAT, {"n": "2"}, "invalid_type", "n"),
    (CHAT, {"stream": "yes"}, "invalid_type", "stream"),
    (CHAT, {"stream": 1}, "invalid_type", "stream"),
    (CHAT, {"temperature": -0.1}, "decimal_below_min_value", "temperature"),
    (CHAT, {"temperature": 2.1}, "decimal_above_max_value", "temperature"),
    (CHAT, {"top_p": 0}, "decimal_below_min_value", "top_p"),
    (CHAT, {"min_p": 2}, "decimal_above_max_value", "min_p"),
    (CHAT, {"presence_penalty": 3}, "decimal_above_max_value", "presence_penalty"),
    (CHAT, {"max_tokens": 0}, "integer_below_min_value", "max_tokens"),
    (CHAT, {"n": 0}, "integer_below_min_value", "n"),
    (CHAT, {"n": 129}, "integer_above_max_value", "n"),
    (CHAT, {"messages": []}, "empty_array", "messages"),
    (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "invalid_value", "messages[0].role"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "unsupported_content_part",
        "messages[0].content[0]",
    ),
    (COMPLETIONS, {"prompt": ""}, "empty_prompt", "prompt"),
    (COMPLETIONS, {"prompt": []}, "empty_prompt", "prompt"),
    (CHAT, {"stop": ["x"] * 33}, "array_above_max_length", "stop"),
    (CHAT, {"stop": [""]}, "invalid_value", "stop"),
    (CHAT, {"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
    (CHAT, {"functions": [{"name": "f"}]}, "unsupported_parameter", "functions"),
    (CHAT, {"response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
    (COMPLETIONS, {"suffix": "x"}, "unsupported_parameter", "suffix"),
    (COMPLETIONS, {"prompt": [65] * M, "max_tokens": 1}, "context_length_exceeded", "prompt"),
    (CHAT, {"max_tokens": M}, "context_length_exceeded", "messages"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "fields", "code", "param"), BAD_FIELDS)
def test_a33_bad_field_is_400_with_the_envelope(
    rig: HttpRig, path: str, fields: dict[str, Any], code: str, param: str | None, stream: bool
) -> None:
    body = chat_body() if path == CHAT else completion_body()
    options: dict[str, Any] = {"stream": True} if stream and "stream_options" not in fields else {}
    with rig.http() as http:
        check_envelope(http.post(path, json={**body, **options, **fields}), 400, "invalid_request_error", code, param)
        check_works(http)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"x"', b'{"temperature": NaN}', b"\xff\xfe", b'{"model":"\\ud800"}', b"[" * 5000],
)
def test_a33_body_that_is_not_a_json_object_is_invalid_json(rig: HttpRig, body: bytes) -> None:
    with rig.http() as http:
        response = http.post(CHAT, content=body, headers={"content-type": "application/json"})
        check_envelope(response, 400, "invalid_request_error", "invalid_json", None)
        check_works(http)


def test_a33_unknown_model_is_404(rig: HttpRig) -> None:
    with rig.http() as http:
        response = http.post(CHAT, json=chat_body(model="other"))
        check_envelope(response, 404, "invalid_request_error", "model_not_found", "model")


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/nope"), ("POST", "/v1"), ("GET", "/v1/models2"), ("GET", "/health/")]
)
def test_a33_unknown_route_is_404(rig: HttpRig, method: str, path: str) -> None:
    with rig.http() as http:
        check_envelope(http.request(method, path), 404, "invalid_request_error", "unknown_url", None)


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [("GET", CHAT, "POST"), ("DELETE", COMPLETIONS, "POST"), ("POST", "/v1/models", "GET"), ("PUT", "/metrics", "GET")],
)
def test_a33_wrong_method_is_405_with_allow(rig: HttpRig, method: str, path: str, allow: str) -> None:
    with rig.http() as http:
        response = http.request(method, path)
        check_envelope(response, 405, "invalid_request_error", "method_not_allowed", None)
        assert response.headers["allow"] == allow


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a33_other_content_types_are_415(rig: HttpRig, media_type: str) -> None:
    with rig.http() as http:
        headers = {"content-type": media_type} if media_type else {}
        response = http.post(CHAT, content=json.dumps(chat_body()), headers=headers)
        check_envelope(response, 415, "invalid_request_error", "unsupported_media_type", None)
        parameters = {"content-type": "application/json; charset=utf-8"}
        assert http.post(CHAT, content=json.dumps(chat_body(max_tokens=1)), headers=parameters).status_code == 200


@pytest.mark.parametrize("declared", [True, False])
def test_a33_too_large_body_is_413_whether_declared_or_not(rig: HttpRig, declared: bool) -> None:
    data = b" " * 300_000
    with rig.http() as http:
        content = data if declared else iter([data[:100_000]] * 3)
        response = http.post(CHAT, content=content, headers={"content-type": "application/json"})
        check_envelope(response, 413, "invalid_request_error", "request_too_large", None)
        check_works(http)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0, "integer_below_min_value"),
        (-1, "integer_below_min_value"),
        ("5", "invalid_type"),
        (1.5, "invalid_type"),
        (True, "invalid_type"),
        (2**31, "context_length_exceeded"),
        (2**63, "context_length_exceeded"),
    ],
)
def test_a36_bad_max_tokens_is_400(rig: HttpRig, path: str, value: object, code: str) -> None:
    body = chat_body() if path == CHAT else completion_body()
    param = "max_tokens" if code != "context_length_exceeded" else "messages" if path == CHAT else "prompt"
    with rig.http() as http:
        response = http.post(path, json={**body, "max_tokens": value})
        check_envelope(response, 400, "invalid_request_error", code, param)
        if value in (0, -1):
            assert "omit it for" in response.json()["error"]["message"]


@pytest.mark.parametrize(("value", "chat_tokens", "completion_tokens"), [(None, M, 16), (1.0, 1, 1), (3, 3, 3)])
def test_a36_null_max_tokens_is_no_limit_and_1_0_is_one(
    rig: HttpRig, value: object, chat_tokens: int, completion_tokens: int
) -> None:
    with rig.http() as http:
        chat = http.post(CHAT, json=chat_body(max_tokens=value)).json()["usage"]
        assert chat["total_tokens" if value is None else "completion_tokens"] == chat_tokens
        completion = http.post(COMPLETIONS, json=completion_body(max_tokens=value)).json()["usage"]
        assert completion["completion_tokens"] == completion_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("length", "status"), [(M - 2, 200), (M - 1, 200), (M, 400), (M + 1, 400), (4 * M, 400)])
def test_a1_prompt_around_the_context_length_is_answered_at_once(
    rig: HttpRig, length: int, status: int, stream: bool
) -> None:
    with rig.http() as http:
        begin = time.perf_counter()
        response = http.post(COMPLETIONS, json=completion_body(prompt=[65] * length, max_tokens=1, stream=stream))
        assert time.perf_counter() - begin < 1.0
        assert response.status_code == status
        if status == 400:
            error = response.json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert f"This model's maximum context length is {M} tokens" in error["message"]
        check_works(http)


@pytest.mark.parametrize("value", [-1, FAKE_VOCAB_SIZE, 2**31, 2**63])
@pytest.mark.parametrize("field", ["prompt", "prompts", "stop_token_ids", "logit_bias"])
def test_a24_token_ids_outside_the_vocabulary_never_reach_the_engine(rig: HttpRig, field: str, value: int) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "prompt": {"prompt": [65, value]},
        "prompts": {"prompt": [[65], [value]]},
        "stop_token_ids": {"stop_token_ids": [value]},
        "logit_bias": {"logit_bias": {str(value): 1}},
    }
    fields = bodies[field]
    with rig.http() as http:
        response = http.post(COMPLETIONS, json=completion_body(**fields))
        check_envelope(response, 400, "invalid_request_error", "invalid_token_id", next(iter(fields)))
        check_works(http)


def test_one_bad_prompt_refuses_all_prompts(rig: HttpRig) -> None:
    before = rig.counters()
    with rig.http() as http:
        response = http.post(COMPLETIONS, json=completion_body(prompt=[[65], [66] * M]))
        check_envelope(response, 400, "invalid_request_error", "context_length_exceeded", "prompt")
    assert rig.counters()["accepted"] == before["accepted"]


def test_a27_template_error_is_400_with_the_templates_words() -> None:
    """The fake template accepts everything, so a template comes with the request."""
    template = "{{ raise_exception('roles must alternate') }}"
    with http_rig(FAKE, trust_request_chat_template=True) as rig, rig.http() as http:
        response = http.post(CHAT, json=chat_body(chat_template=template))
        check_envelope(response, 400, "invalid_request_error", "chat_template_error", "messages")
        assert response.json()["error"]["message"] == "roles must alternate"
        check_envelope(
            http.post(CHAT, json=chat_body(chat_template="{% if %}")),
            400,
            "invalid_request_error",
            "chat_template_error",
            "chat_template",
        )
        check_works(http)


@pytest.mark.parametrize("value", ["0", "-5", "x", "nan", "inf", "1e12"])
def test_bad_timeout_header_is_400(rig: HttpRig, value: str) -> None:
    with rig.http() as http:
        response = http.post(CHAT, json=chat_body(), headers={"x-request-timeout-ms": value})
        check_envelope(response, 400, "invalid_request_error", "invalid_value", "x-request-timeout-ms")


@pytest.mark.parametrize(
    ("statuses", "status", "kind", "code"),
    [
        ([ReplicaStatus("s", "ready", waiting=512, capacity_tokens=999)], 429, "rate_limit_error", "queue_full"),
        ([], 503, "server_error", "server_loading"),
        ([ReplicaStatus("s", "loading")], 503, "server_error", "server_loading"),
        ([ReplicaStatus("s", "paused"), ReplicaStatus("t", "dead")], 503, "server_error", "server_paused"),
        ([ReplicaStatus("s", "draining")], 503, "server_error", "server_draining"),
        ([ReplicaStatus("s", "stalled")], 503, "server_error", "engine_failed"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusal_before_admission_has_retry_after(
    rig: HttpRig, statuses: list[ReplicaStatus], status: int, kind: str, code: str, stream: bool
) -> None:
    rejected = rig.counters()["rejected"]
    with rig.http() as http:
        rig.cluster.statuses = statuses
        try:
            response = http.post(CHAT, json=chat_body(stream=stream))
        finally:
            rig.cluster.statuses = None
        check_envelope(response, status, kind, code, None)
        assert int(response.headers["retry-after"]) >= 1
        assert "x-should-retry" not in response.headers
        check_works(http)
    assert rig.counters()["rejected"] == rejected + 1


def test_one_full_scheduler_of_two_does_not_refuse(rig: HttpRig) -> None:
    full = ReplicaStatus("s", "ready", waiting=600, capacity_tokens=999)
    rig.cluster.statuses = [full, ReplicaStatus("t", "ready", capacity_tokens=999)]
    try:
        with rig.http() as http:
            check_works(http)
    finally:
        rig.cluster.statuses = None


def test_bug_is_500_without_a_trace_and_is_not_retried(rig: HttpRig, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise RuntimeError("secret /path/file.py")

    monkeypatch.setattr(rig.frontend, "model", broken)
    with rig.http() as http:
        response = http.get("/v1/models/x")
        check_envelope(response, 500, "server_error", "internal_error", None)
        assert response.headers["x-should-retry"] == "false"
        assert "secret" not in response.text
        check_works(http)
