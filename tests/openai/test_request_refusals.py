"""Several problems, ignored fields, and the promise that nothing but a RequestError leaves the parser."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overlap_serve.errors import RequestError
from overlap_serve.openai.ignored import INERT
from overlap_serve.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    ignored_label,
    parse_chat,
    parse_completion,
    parse_json,
)
from tests.openai.common import FACTS, USER, chat, completion, config, refused_chat, refused_completion


def test_the_first_problem_in_the_order_of_the_body_is_reported() -> None:
    assert refused_chat(top_p=0, temperature=5).param == "top_p"
    assert refused_chat(temperature=5, top_p=0).param == "temperature"
    assert refused_chat(stream_options={}, temperature=5).param == "stream_options"
    assert refused_chat(temperature=5, model="other").http_status == 400
    assert refused_chat(model="other", temperature=5).http_status == 404
    assert refused_chat(messages=[{"role": "x"}, {"role": "y"}], n=0).param == "messages[0].role"


def test_a_missing_field_comes_last() -> None:
    with pytest.raises(RequestError) as caught:
        parse_chat({"temperature": 5}, config(), FACTS)
    assert caught.value.param == "temperature"
    assert "messages is required" in caught.value.message


def test_the_message_lists_up_to_five_problems() -> None:
    names = ["temperature", "top_p", "min_p", "n", "seed", "top_k", "user"]
    error = refused_chat(**dict.fromkeys(names, [1] * 2000))
    assert [name for name in names if f"{name} must" in error.message] == names[:5]
    assert error.message.endswith("; and 2 more")
    assert len(error.message) < 300


def test_millions_of_broken_items_cost_one_report() -> None:
    calls: list[object] = [{}] * 200_000
    error = refused_chat(messages=[{"role": "assistant", "content": "", "tool_calls": calls}] * 5)
    assert error.param == "messages[0].tool_calls[0].id"
    assert error.message.count(";") == 1  # id and function of that one call


def test_param_and_message_never_hold_a_long_value_of_the_client() -> None:
    for value in ("x" * 10_000, 10**4000, "\n" * 100, "é\u2028" * 100):
        error = refused_chat(reasoning_effort=value, model="y" * 10_000, max_tokens=-(10**4000))
        assert error.param == "reasoning_effort"
        assert len(error.message) < 500 and "\n" not in error.message
        json.dumps(error.envelope()).encode()


def test_inert_and_unknown_fields_are_reported_when_they_have_a_value() -> None:
    request = chat(metadata={}, store=False, foo=1, bar=None, user="u", prediction=None)
    assert request.ignored_fields == ("metadata", "store", "foo")
    assert completion(foo=1).ignored_fields == ("foo",)
    assert chat().ignored_fields == ()
    for name in INERT - {"best_of"}:
        assert chat(**{name: "any"}).ignored_fields == (name,)
        assert completion(**{name: {"deep": [1]}}).ignored_fields == (name,)


def test_ignored_options_and_message_keys_are_reported_by_their_place() -> None:
    options = {"include_obfuscation": False, "include_usage": True, "other_thing": 1, "none": None}
    assert chat(stream=True, stream_options=options).ignored_fields == (
        "stream_options.include_obfuscation",
        "stream_options.other_thing",
    )
    assert chat(messages=[{**USER, "mood": 1, "audio": None}] * 3).ignored_fields == ("messages.mood",)


def test_ignored_names_fit_in_a_header_and_in_a_fixed_set_of_labels() -> None:
    request = chat(**{"a\r\nx: y": 1, "é": 1, "z" * 65: 1, "fine": 1})
    assert request.ignored_fields == ("other", "fine")
    many = chat(**{f"f{i}": 1 for i in range(1000)}).ignored_fields
    assert len(many) == 32 and many[-1] == "other"
    assert ignored_label("metadata") == "metadata"
    assert {ignored_label(name) for name in ("foo", "messages.x", "", "other")} == {"other"}


def test_a_body_cannot_set_what_is_not_a_field() -> None:
    assert chat(ignored_fields=["x"], _ignored=["y"]).ignored_fields == ("ignored_fields", "_ignored")


def test_strict_fields_refuse_unknown_names_but_not_inert_ones() -> None:
    strict = config(strict_fields=True)
    assert chat(strict, metadata={}, rid="a", user=None, foo=None).label == "a"
    error = refused_chat(strict, foo=1, temperature=5)
    assert (error.code, error.param) == ("unknown_parameter", "foo")
    assert "temperature" in error.message
    assert refused_completion(strict, temperature=5, foo=1).param == "temperature"
    nested = refused_chat(strict, stream=True, stream_options={"x": 1})
    assert (nested.code, nested.param) == ("unknown_parameter", "stream_options.x")
    assert len(refused_chat(strict, **{"x" * 10_000: 1}).message) < 200


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**40), 10**40)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(["user", "assistant", "tool", "text", "function", "m", "none", "auto"])
)
KEYS = st.text(max_size=4) | st.sampled_from(
    ["role", "content", "type", "text", "tool_calls", "id", "function", "name"]
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=8
)
PARSERS: list[tuple[Callable[..., object], list[str]]] = [
    (parse_chat, sorted({*ChatRequest.model_fields, "rid", "extra_key"})),
    (parse_completion, sorted({*CompletionRequest.model_fields, "rid", "extra_key"})),
]


@pytest.mark.parametrize(("parse", "names"), PARSERS, ids=["chat", "completion"])
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a33_arbitrary_json_never_raises_anything_but_a_request_error(
    parse: Callable[..., object], names: list[str], data: st.DataObject
) -> None:
    fields = st.dictionaries(st.sampled_from(names) | st.text(max_size=5), VALUES, max_size=6)
    body = data.draw(fields | fields.map(lambda some: {"messages": [USER], "prompt": "hi", **some}))
    strict = data.draw(st.booleans())
    try:
        parsed = parse(parse_json(json.dumps(body, allow_nan=True).encode()), config(strict_fields=strict), FACTS)
        assert isinstance(parsed, (ChatRequest, CompletionRequest))
        parsed.sampling(max(1, parsed.min_tokens), 0, FACTS)
        parsed.text_params(FACTS)
        if isinstance(parsed, ChatRequest):
            parsed.template_messages()
            parsed.template_kwargs()
    except RequestError as error:
        assert error.http_status in (400, 404)
        assert isinstance(error.code, str)
        json.dumps(error.envelope(), ensure_ascii=False).encode()
