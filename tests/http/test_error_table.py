"""Every refusal of http-api section 13 that HTTP can produce here: status, envelope, string code; and the next request works."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import httpx
import pytest

from deployments.control import CONTROL_PATHS
from overlap_serve.config import FAKE_VOCAB_SIZE, FakeModel
from overlap_serve.messages import ReplicaStatus
from tests.http.raw import CHAT, COMPLETIONS, RawPost, chat_body, completion_body
from tests.http_rig import HttpRig, http_rig

M = 256  # max_model_len
FAKE = FakeModel(base_ms=1.0, max_model_len=M)
CONFIG = {"max_body_bytes": 200_000}
EMBEDDINGS = "/v1/embeddings"
USER_KEY, ADMIN_KEY = "key-user", "key-admin"


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


INVALID = "invalid_request_error"
JSON = MappingProxyType({"content-type": "application/json"})


@contextmanager
def nothing(rig: HttpRig) -> Iterator[None]:
    yield


def heard(*statuses: ReplicaStatus) -> Callable[[HttpRig], AbstractContextManager[None]]:
    """The schedulers say this of themselves."""

    @contextmanager
    def given(rig: HttpRig) -> Iterator[None]:
        rig.cluster.statuses = list(statuses)
        try:
            yield
        finally:
            rig.cluster.statuses = None

    return given


@contextmanager
def once_accepted(rig: HttpRig, act: Callable[[], object]) -> Iterator[None]:
    """The next request gets no output; `act` happens as soon as it is accepted."""

    def wait_and_act() -> None:
        rig.until(lambda: rig.frontend.num_open > 0, "the request is accepted")
        act()

    thread = threading.Thread(target=wait_and_act)
    with rig.calls.nowhere():
        thread.start()
        yield
        thread.join()


@contextmanager
def engine_dies(rig: HttpRig) -> Iterator[None]:
    with once_accepted(rig, lambda: rig.do(rig.calls.lose)):
        yield


@contextmanager
def busy(rig: HttpRig) -> Iterator[None]:
    with RawPost(rig, CHAT, chat_body(stream=True, max_tokens=200, ignore_eos=True)) as stream:
        stream.read_events(2)
        yield


@contextmanager
def paused(rig: HttpRig) -> Iterator[None]:
    with rig.http() as http:
        http.post("/pause").raise_for_status()
        yield
        http.post("/resume").raise_for_status()


@contextmanager
def aborted_by_id(rig: HttpRig) -> Iterator[None]:
    def abort() -> None:
        with rig.http() as http:
            assert http.post("/v1/abort", json={"request_id": "row"}).json() == {"aborted": 1}

    with once_accepted(rig, abort):
        yield


@contextmanager
def bug(rig: HttpRig) -> Iterator[None]:
    def broken(name: str) -> dict[str, object]:
        raise RuntimeError("secret /path/file.py")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rig.frontend, "model", broken)
        yield


class Row(NamedTuple):
    """One line of the table of http-api section 13, or one of the cases that it joins.

    fields: over a good body of `path`. content: the bytes instead. given: what happens around the request. answer: headers that
    must be there. why_not: the reason of a row that cannot be produced yet.
    """

    case: str
    status: int
    kind: str
    code: str
    param: str | None
    path: str = CHAT
    fields: Mapping[str, Any] = MappingProxyType({})
    method: str = "POST"
    content: bytes | None = None
    headers: Mapping[str, str] = JSON
    rig: str = "plain"
    given: Callable[[HttpRig], AbstractContextManager[None]] = nothing
    answer: Mapping[str, str] = MappingProxyType({})
    why_not: str = ""


def bad(case: str, code: str, param: str | None, *, path: str = CHAT, **fields: Any) -> Row:
    return Row(case, 400, INVALID, code, param, path, fields)


def unbuilt(case: str, why_not: str) -> Row:
    return Row(case, 0, "", "", None, why_not=why_not)


IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
RETRY = {"retry-after": "1"}
LATER = {"retry-after": "5"}
NO_RETRY = {"x-should-retry": "false"}
NO_TOOLS = "tools come with a later issue; until then any tool_choice but none is unsupported_parameter"
NO_GRAMMAR = "structured outputs come with a later issue; until then they are unsupported_parameter"

ROWS = [
    *(
        Row("body not JSON / not an object / NaN", 400, INVALID, "invalid_json", None, content=content)
        for content in (b"{", b"[]", b'{"temperature": NaN}')
    ),
    bad("missing required field", "missing_required_parameter", "messages", messages=None),
    bad("missing required field", "missing_required_parameter", "prompt", path=COMPLETIONS, prompt=None),
    bad("wrong type", "invalid_type", "messages", messages={}),
    bad("wrong type", "invalid_type", "n", n="2"),
    bad("wrong type", "invalid_type", "stream", stream="yes"),
    bad("wrong type", "invalid_type", "stream", stream=1),
    bad(
        "wrong type",
        "invalid_type",
        "messages[0].content[0].text",
        messages=[{"role": "user", "content": [{"type": "text", "text": 1}]}],
    ),
    bad("temperature < 0", "decimal_below_min_value", "temperature", temperature=-0.1),
    bad("temperature > 2", "decimal_above_max_value", "temperature", temperature=2.1),
    bad("top_p 0", "decimal_below_min_value", "top_p", top_p=0),
    bad("min_p 2", "decimal_above_max_value", "min_p", min_p=2),
    bad("penalties out of range", "decimal_above_max_value", "presence_penalty", presence_penalty=3),
    bad("penalties out of range", "decimal_below_min_value", "frequency_penalty", frequency_penalty=-3),
    bad("max_tokens 0 or negative", "integer_below_min_value", "max_tokens", max_tokens=0),
    bad("max_tokens 0 or negative", "integer_below_min_value", "max_tokens", max_tokens=-1),
    bad("max_tokens 0 or negative", "integer_below_min_value", "max_tokens", path=COMPLETIONS, max_tokens=0),
    bad("n 0", "integer_below_min_value", "n", n=0),
    bad("n > max", "integer_above_max_value", "n", n=129),
    bad("top_logprobs 21", "integer_above_max_value", "top_logprobs", logprobs=True, top_logprobs=21),
    bad("top_logprobs 21", "integer_above_max_value", "logprobs", path=COMPLETIONS, logprobs=21),
    bad("top_logprobs without logprobs", "invalid_value", "top_logprobs", top_logprobs=2),
    bad("messages []", "empty_array", "messages", messages=[]),
    bad("bad role", "invalid_value", "messages[0].role", messages=[{"role": "king", "content": "x"}]),
    bad("content part", "unsupported_content_part", "messages[0].content[0]", messages=[IMAGE]),
    Row(
        "template raises",
        400,
        INVALID,
        "chat_template_error",
        "messages",
        rig="trusting",
        fields={"chat_template": "{{ raise_exception('roles must alternate') }}"},
    ),
    bad("prompt empty", "empty_prompt", "prompt", path=COMPLETIONS, prompt=""),
    bad("prompt empty", "empty_prompt", "prompt", path=COMPLETIONS, prompt=[]),
    bad("token id out of vocab", "invalid_token_id", "prompt", path=COMPLETIONS, prompt=[FAKE_VOCAB_SIZE]),
    bad("token id out of vocab", "invalid_token_id", "logit_bias", logit_bias={str(FAKE_VOCAB_SIZE): 1}),
    bad("token id out of vocab", "invalid_token_id", "stop_token_ids", stop_token_ids=[-1]),
    bad("token id out of vocab", "invalid_token_id", "tokens", path="/detokenize", tokens=[FAKE_VOCAB_SIZE]),
    bad("stop: 33 items", "array_above_max_length", "stop", stop=["x"] * 33),
    bad("stop: empty item", "invalid_value", "stop", stop=[""]),
    bad(
        "stream_options without stream",
        "invalid_value",
        "stream_options",
        stream_options={"include_usage": True},
        stream=False,
    ),
    unbuilt("tool_choice without tools, unknown named function", NO_TOOLS),
    unbuilt("bad schema / regex / grammar", NO_GRAMMAR),
    unbuilt("two constraints", NO_GRAMMAR),
    bad("rejected field", "unsupported_parameter", "functions", functions=[{"name": "f"}]),
    bad("rejected field", "unsupported_parameter", "audio", audio={"voice": "x"}),
    bad("rejected field", "unsupported_parameter", "use_beam_search", use_beam_search=True),
    bad("rejected field", "unsupported_parameter", "suffix", path=COMPLETIONS, suffix="x"),
    bad("field of a feature that is not built", "unsupported_parameter", "tools", tools=[{"type": "function"}]),
    bad("field of a feature that is not built", "unsupported_parameter", "tool_choice", tool_choice="auto"),
    bad(
        "field of a feature that is not built",
        "unsupported_parameter",
        "response_format",
        response_format={"type": "json_object"},
    ),
    bad("field of a feature that is not built", "unsupported_parameter", "regex", path=COMPLETIONS, regex="a"),
    Row("unknown field with strict mode", 400, INVALID, "unknown_parameter", "zzz", fields={"zzz": 1}, rig="strict"),
    bad("context too long", "context_length_exceeded", "messages", max_tokens=M),
    bad("context too long", "context_length_exceeded", "prompt", path=COMPLETIONS, prompt=[65] * M, max_tokens=1),
    bad("prompt_logprobs in a stream", "invalid_value", "prompt_logprobs", prompt_logprobs=1, stream=True),
    bad("embedding on a generate model", "unsupported_operation", "model", path=EMBEDDINGS),
    unbuilt("generation on an embedding model", "embedding models come with a later issue"),
    Row(
        "key missing",
        401,
        "authentication_error",
        "invalid_api_key",
        None,
        rig="keyed",
        answer={"www-authenticate": "Bearer"},
    ),
    Row(
        "key wrong",
        401,
        "authentication_error",
        "invalid_api_key",
        None,
        rig="keyed",
        headers={"authorization": "Bearer no", "content-type": "application/json"},
        answer={"www-authenticate": "Bearer"},
    ),
    *(
        Row(
            "admin route with user key",
            403,
            "permission_error",
            "insufficient_permissions",
            None,
            path,
            {"all": True} if path == "/v1/abort" else {},
            rig="keyed",
            headers={"authorization": f"Bearer {USER_KEY}", "content-type": "application/json"},
        )
        for path in CONTROL_PATHS
    ),
    Row("unknown model", 404, INVALID, "model_not_found", "model", fields={"model": "other"}),
    Row("unknown model", 404, INVALID, "model_not_found", "model", "/v1/models/org/other", method="GET"),
    Row("unknown model", 404, INVALID, "model_not_found", "model", EMBEDDINGS, {"model": "other"}),
    Row("unknown route", 404, INVALID, "unknown_url", None, "/v1/nope", method="GET"),
    Row(
        "unknown route: /health/generate, which is off",
        404,
        INVALID,
        "unknown_url",
        None,
        "/health/generate",
        method="GET",
    ),
    Row("wrong method", 405, INVALID, "method_not_allowed", None, method="GET", answer={"allow": "POST"}),
    Row("wrong method", 405, INVALID, "method_not_allowed", None, "/load", answer={"allow": "GET"}),
    Row("wrong method", 405, INVALID, "method_not_allowed", None, "/pause", method="GET", answer={"allow": "POST"}),
    Row(
        "deadline passed before any output",
        408,
        "timeout_error",
        "deadline_exceeded",
        None,
        fields={"timeout_s": 1e-6},
        answer=NO_RETRY,
    ),
    Row("cache flush while busy", 409, "conflict_error", "busy", None, "/flush_cache", given=busy),
    *(
        Row("profile of the fake engine", 400, INVALID, "unsupported_operation", None, path)
        for path in ("/start_profile", "/stop_profile")
    ),
    bad("wrong type in a control route", "invalid_type", "force", path="/flush_cache", force="yes"),
    bad("wrong type in a control route", "invalid_type", "abort", path="/pause", abort=1),
    Row("body too large", 413, INVALID, "request_too_large", None, content=b" " * 300_000),
    Row("body too large", 413, INVALID, "request_too_large", None, "/tokenize", content=b" " * 300_000),
    Row(
        "content type",
        415,
        INVALID,
        "unsupported_media_type",
        None,
        content=b"{}",
        headers={"content-type": "text/plain"},
    ),
    Row("content type", 415, INVALID, "unsupported_media_type", None, content=b"{}", headers={}),
    Row(
        "queue full",
        429,
        "rate_limit_error",
        "queue_full",
        None,
        answer=RETRY,
        given=heard(ReplicaStatus("s", "ready", waiting=512, capacity_tokens=999)),
    ),
    unbuilt("tenant quota", "there are no tenants yet"),
    unbuilt("client closed", "499 is for logs, nobody reads it; tests/http/test_leaving.py has what happens"),
    Row(
        "bug on this input",
        500,
        "server_error",
        "internal_error",
        None,
        "/v1/models/x",
        method="GET",
        given=bug,
        answer=NO_RETRY,
    ),
    Row("engine died with the request", 503, "server_error", "engine_failed", None, given=engine_dies, answer=RETRY),
    Row("loading", 503, "server_error", "server_loading", None, given=heard(), answer=LATER),
    Row(
        "loading", 503, "server_error", "server_loading", None, given=heard(ReplicaStatus("s", "loading")), answer=LATER
    ),
    Row(
        "draining",
        503,
        "server_error",
        "server_draining",
        None,
        given=heard(ReplicaStatus("s", "draining")),
        answer=LATER,
    ),
    Row("paused", 503, "server_error", "server_paused", None, given=heard(ReplicaStatus("s", "paused")), answer=LATER),
    Row("paused", 503, "server_error", "server_paused", None, given=paused, answer=LATER),
    Row(
        "aborted by id before any output",
        409,
        "aborted_error",
        "request_aborted",
        None,
        given=aborted_by_id,
        headers={"content-type": "application/json", "x-request-id": "row"},
        answer=NO_RETRY,
    ),
]


def cases() -> Iterator[Any]:
    """Each row, and once more as a stream where the request could be one: a refusal is never inside of a stream."""
    for number, row in enumerate(ROWS):
        marks = [pytest.mark.skip(reason=row.why_not)] if row.why_not else []
        may_stream = row.path in (CHAT, COMPLETIONS) and row.content is None and "stream" not in row.fields
        for stream in (False, True) if may_stream and not row.why_not else (False,):
            yield pytest.param(row, stream, marks=marks, id=f"{number}-{row.case}{' (stream)' * stream}")


@pytest.fixture(scope="module")
def rigs(module_rig: HttpRig) -> Iterator[Callable[[str], HttpRig]]:
    """Servers by name, each started when first asked for."""
    configs: dict[str, dict[str, Any]] = {
        "keyed": {"api_keys": (USER_KEY,), "admin_api_keys": (ADMIN_KEY,)},
        "strict": {"strict_fields": True},
        "trusting": {"trust_request_chat_template": True},
    }
    with ExitStack() as stack:
        running = {"plain": module_rig}

        def start(name: str) -> HttpRig:
            if name not in running:
                running[name] = stack.enter_context(http_rig(FAKE, **configs[name]))
            return running[name]

        yield start


@pytest.mark.parametrize(("row", "stream"), list(cases()))
def test_a33_every_row_of_the_error_table(rigs: Callable[[str], HttpRig], row: Row, stream: bool) -> None:
    rig = rigs(row.rig)
    bodies: dict[str, dict[str, Any]] = {CHAT: chat_body(), COMPLETIONS: completion_body(), EMBEDDINGS: {"input": "x"}}
    body = json.dumps({**bodies.get(row.path, {}), **({"stream": True} if stream else {}), **row.fields}).encode()
    content = None if row.method == "GET" else body if row.content is None else row.content
    with rig.http() as http:
        with row.given(rig):
            response = http.request(row.method, row.path, content=content, headers=row.headers)
        check_envelope(response, row.status, row.kind, row.code, row.param)
        for name in ("retry-after", "x-should-retry", "www-authenticate", "allow"):
            assert response.headers.get(name) == row.answer.get(name), name
        assert "secret" not in response.text
        http.headers["authorization"] = f"Bearer {USER_KEY}"
        check_works(http)
    rig.assert_at_rest()


def test_a33_an_error_inside_a_stream_has_the_same_envelope(rig: HttpRig) -> None:
    body = chat_body(stream=True, max_tokens=200, ignore_eos=True, stream_options={"include_usage": True})
    with RawPost(rig, CHAT, body) as post:
        post.read_events(3)
        rig.do(rig.calls.lose)
        post.read_events(10**6)
    events = [line.removeprefix("data: ") for line in post.received.decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == "engine_failed"
    assert set(json.loads(events[-2])["error"]) == {"message", "type", "param", "code"}
    assert not any(json.loads(event)["choices"][0]["finish_reason"] for event in events[:-2])
    with rig.http() as http:
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
