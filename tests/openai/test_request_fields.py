"""Every field of http-api sections 2.1 and 8: accepted, edge, refused with code and param."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from overlap_serve.errors import InvalidRequest
from overlap_serve.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    is_request_id,
    parse_chat,
    parse_completion,
    parse_timeout_ms,
)
from tests.openai.common import (
    FACTS,
    MAX_LEN,
    TOKENS,
    USER,
    VOCAB,
    chat,
    completion,
    config,
    refused_chat,
    refused_completion,
)

TYPE, INT_LOW, INT_HIGH = "invalid_type", "integer_below_min_value", "integer_above_max_value"
LOW, HIGH, VALUE = "decimal_below_min_value", "decimal_above_max_value", "invalid_value"
UNSUPPORTED = "unsupported_parameter"


class Field(NamedTuple):
    """accepted: (given, attribute value). refused: (given, code)."""

    name: str
    accepted: list[tuple[object, object]]
    refused: list[tuple[object, str]]


def number(name: str, low: float, high: float, *, low_excluded: bool = False) -> Field:
    below = low if low_excluded else low - 0.01
    accepted: list[tuple[object, object]] = [(high, high), (int(high), high), (low + 0.01, low + 0.01)]
    if not low_excluded:
        accepted.append((low, low))
    refused: list[tuple[object, str]] = [
        (below, LOW),
        (high + 0.01, HIGH),
        (float("inf"), HIGH),
        (float("-inf"), LOW),
        (10**400, HIGH),
        ("1", TYPE),
        (True, TYPE),
        ([], TYPE),
    ]
    return Field(name, accepted, refused)


NOT_INT: list[tuple[object, str]] = [
    ("1", TYPE),
    (1.5, TYPE),
    (True, TYPE),
    ([], TYPE),
    ({}, TYPE),
    (float("inf"), TYPE),
]
NOT_BOOL: list[tuple[object, str]] = [(1, TYPE), (0, TYPE), ("true", TYPE), ([], TYPE)]
NOT_STRING: list[tuple[object, str]] = [(1, TYPE), (True, TYPE), ([], TYPE), ({}, TYPE)]


def integer(name: str, accepted: list[int], refused: list[tuple[object, str]]) -> Field:
    return Field(name, [(i, i) for i in accepted] + [(float(accepted[0]), accepted[0])], [*NOT_INT, *refused])


def flag(name: str) -> Field:
    return Field(name, [(True, True), (False, False)], NOT_BOOL)


def absent_feature(name: str, *values: object) -> Field:
    return Field(name, [], [(value, UNSUPPORTED) for value in values])


SHARED = [
    Field(
        "model", [("m", "m"), ("", "m")], [("other", "model_not_found"), ("m:adapter", "model_not_found"), *NOT_STRING]
    ),
    flag("stream"),
    integer("n", [1, 128], [(0, INT_LOW), (-1, INT_LOW), (129, INT_HIGH), (2**70, INT_HIGH)]),
    integer("max_completion_tokens", [1, 2**31], [(0, INT_LOW), (-1, INT_LOW)]),
    integer("max_tokens", [1, 2**31, 2**63], [(0, INT_LOW), (-1, INT_LOW)]),
    integer("min_tokens", [0, 3], [(-1, INT_LOW)]),
    number("temperature", 0.0, 2.0),
    number("top_p", 0.0, 1.0, low_excluded=True),
    number("min_p", 0.0, 1.0),
    number("presence_penalty", -2.0, 2.0),
    number("frequency_penalty", -2.0, 2.0),
    number("repetition_penalty", 0.0, 2.0, low_excluded=True),
    integer("top_k", [-1, 0, 1, 10**6], [(-2, INT_LOW)]),
    integer("seed", [0, -(2**63), 2**63 - 1], [(2**63, INT_HIGH), (-(2**63) - 1, INT_LOW)]),
    Field(
        "logit_bias",
        [
            ({}, {}),
            ({"0": -100, "899": 100.0}, {0: -100.0, 899: 100.0}),
            ({str(i): 1 for i in range(TOKENS)}, dict.fromkeys(range(TOKENS), 1.0)),
        ],
        [
            ({"1": 100.5}, HIGH),
            ({"1": -101}, LOW),
            ({"1": 10**400}, HIGH),
            ({"1": "2"}, TYPE),
            ({"1": True}, TYPE),
            ({"1": None}, TYPE),
            ({"": 1}, "invalid_token_id"),
            ({"a": 1}, "invalid_token_id"),
            ({"01": 1}, "invalid_token_id"),
            ({"1.0": 1}, "invalid_token_id"),
            ({"٣": 1}, "invalid_token_id"),
            ({str(i): 1 for i in range(1025)}, "array_above_max_length"),
            ([], TYPE),
            ("1", TYPE),
        ],
    ),
    Field(
        "stop",
        [("a", ("a",)), (["a"], ("a",)), ([], ()), (["x"] * 32, ("x",) * 32), ("é" * 1024, ("é" * 1024,))],
        [
            ("", VALUE),
            (["a", ""], VALUE),
            (["x"] * 33, "array_above_max_length"),
            ("x" * 1025, "string_above_max_length"),
            (["a", 1], TYPE),
            ([None], TYPE),
            (1, TYPE),
            ({}, TYPE),
        ],
    ),
    Field(
        "stop_token_ids",
        [([], ()), ([0, 899.0], (0, 899))],
        [("1", TYPE), (1, TYPE), (["1"], TYPE), ([1.5], TYPE), ([True], TYPE), ([None], TYPE)],
    ),
    flag("include_stop_str_in_output"),
    flag("ignore_eos"),
    flag("skip_special_tokens"),
    flag("return_token_ids"),
    flag("add_special_tokens"),
    Field(
        "timeout_s",
        [(1, 1.0), (0.001, 0.001), (3600.0, 3600.0)],
        [(0, LOW), (-1, LOW), (3600.5, HIGH), (float("inf"), HIGH), ("5", TYPE), (True, TYPE)],
    ),
    Field(
        "cache_salt",
        [("s", "s"), ("x" * 128, "x" * 128)],
        [("", VALUE), ("x" * 129, "string_above_max_length"), *NOT_STRING],
    ),
    integer("truncate_prompt_tokens", [1, -1, MAX_LEN], [(0, INT_LOW), (-2, INT_LOW), (MAX_LEN + 1, INT_HIGH)]),
    Field("request_id", [("id", "id")], NOT_STRING),
    Field("user", [("me", "me")], NOT_STRING),
    integer("prompt_logprobs", [0, 20], [(21, INT_HIGH), (-1, INT_LOW)]),
    Field(
        "response_format",
        [({"type": "text"}, {"type": "text"})],
        [
            ({"type": "json_object"}, UNSUPPORTED),
            ({"type": "json_schema", "json_schema": {}}, UNSUPPORTED),
            ("text", TYPE),
        ],
    ),
    Field(
        "structured_outputs", [({}, {}), ({"json": None}, {"json": None})], [({"regex": "a"}, UNSUPPORTED), ([], TYPE)]
    ),
    absent_feature("guided_json", {}, "{}"),
    absent_feature("guided_regex", "a"),
    absent_feature("guided_choice", ["a"]),
    absent_feature("guided_grammar", "a"),
    absent_feature("regex", "a"),
    absent_feature("ebnf", "a"),
    absent_feature("lora_path", "a"),
    absent_feature("stop_regex", "a", ["a"]),
    Field("use_beam_search", [(False, False)], [(True, UNSUPPORTED), *NOT_BOOL]),
    Field("beam_width", [(1, 1)], [(2, UNSUPPORTED), (0, UNSUPPORTED), ("1", TYPE)]),
    Field("length_penalty", [(1, 1.0), (1.0, 1.0)], [(0.5, UNSUPPORTED), ("1", TYPE)]),
]

CHAT = [
    flag("add_generation_prompt"),
    flag("parallel_tool_calls"),
    flag("separate_reasoning"),
    flag("enable_thinking"),
    Field("continue_final_message", [(False, False)], [(True, VALUE), *NOT_BOOL]),
    Field(
        "reasoning_effort",
        [(e, e) for e in ("none", "minimal", "low", "medium", "high", "xhigh", "max")],
        [("huge", VALUE), ("", VALUE), (1, TYPE), ([], TYPE)],
    ),
    Field(
        "chat_template_kwargs",
        [({}, {}), ({"a": [1]}, {"a": [1]})],
        [
            ([], TYPE),
            ("a", TYPE),
            ({"messages": []}, VALUE),
            ({"tools": []}, VALUE),
            ({"add_generation_prompt": True}, VALUE),
        ],
    ),
    Field("documents", [([], []), ([{"text": "a"}], [{"text": "a"}])], [({}, TYPE), ("a", TYPE)]),
    flag("logprobs"),
    Field("top_logprobs", [], [(21, INT_HIGH), (-1, INT_LOW), (0, VALUE), (20, VALUE), *NOT_INT]),
    Field("tools", [([], [])], [([{"type": "function"}], UNSUPPORTED), ({}, TYPE), ("a", TYPE)]),
    Field(
        "tool_choice",
        [("none", "none")],
        [("auto", UNSUPPORTED), ("required", UNSUPPORTED), ({"type": "function"}, UNSUPPORTED)],
    ),
    Field("include_reasoning", [(True, True)], [(False, UNSUPPORTED), (1, TYPE), ("true", TYPE)]),
    Field("chat_template", [], [("{{ messages }}", UNSUPPORTED), (1, TYPE)]),
    absent_feature("functions", [], [{}]),
    absent_feature("function_call", "none", "auto"),
    Field(
        "modalities",
        [(["text"], ["text"]), ([], [])],
        [(["text", "audio"], UNSUPPORTED), (["audio"], UNSUPPORTED), ("text", TYPE)],
    ),
    absent_feature("audio", {}, {"voice": "x"}),
    absent_feature("web_search_options", {}),
]

COMPLETION = [
    Field(
        "prompt",
        [
            ("a", ("a",)),
            (["a", "b"], ("a", "b")),
            ([0, 1.0, 899], ((0, 1, 899),)),
            ([[1], [2, 3]], ((1,), (2, 3))),
            (["a"] * 1024, ("a",) * 1024),
        ],
        [
            ("", "empty_prompt"),
            ([], "empty_prompt"),
            (["a", ""], "empty_prompt"),
            ([[1], []], "empty_prompt"),
            (["a"] * 1025, "array_above_max_length"),
            ([[1]] * 1025, "array_above_max_length"),
            (["a", 1], TYPE),
            (["a", [1]], TYPE),
            ([1, [1]], TYPE),
            ([True], TYPE),
            ([1, True], TYPE),
            ([1, "1"], TYPE),
            ([[1, "1"]], TYPE),
            ([1.5], TYPE),
            ([[1, None]], TYPE),
            ([None], TYPE),
            ([{}], TYPE),
            (1, TYPE),
            ({}, TYPE),
            (True, TYPE),
        ],
    ),
    flag("echo"),
    integer("logprobs", [0, 20], [(21, INT_HIGH), (-1, INT_LOW)]),
    Field("suffix", [("", "")], [("end", UNSUPPORTED), (1, TYPE)]),
    Field("tools", [([], [])], [([{}], UNSUPPORTED)]),
    Field("tool_choice", [("none", "none")], [("auto", UNSUPPORTED)]),
    absent_feature("prompt_embeds", "AAAA", []),
    absent_feature("json_schema", "{}"),
    absent_feature("messages", [USER]),
    absent_feature("reasoning_effort", "low"),
    absent_feature("separate_reasoning", True),
    absent_feature("include_reasoning", True),
    absent_feature("enable_thinking", True),
]


def accepted(fields: list[Field]) -> list[object]:
    return [
        pytest.param(f.name, given, value, id=f"{f.name}-{i}")
        for f in fields
        for i, (given, value) in enumerate(f.accepted)
    ]


def refused(fields: list[Field]) -> list[object]:
    return [
        pytest.param(f.name, given, code, id=f"{f.name}-{i}-{code}")
        for f in fields
        for i, (given, code) in enumerate(f.refused)
    ]


@pytest.mark.parametrize(("name", "given", "value"), accepted(SHARED + CHAT))
def test_chat_accepts(name: str, given: object, value: object) -> None:
    got = getattr(chat(**{name: given}), name)
    assert (got, type(got)) == (value, type(value))


@pytest.mark.parametrize(("name", "given", "value"), accepted(SHARED + COMPLETION))
def test_completion_accepts(name: str, given: object, value: object) -> None:
    got = getattr(completion(**{name: given}), name)
    assert (got, type(got)) == (value, type(value))


@pytest.mark.parametrize(("name", "given", "code"), refused(SHARED + CHAT))
def test_chat_refuses(name: str, given: object, code: str) -> None:
    error = refused_chat(**{name: given})
    assert (error.code, error.param) == (code, name)
    assert error.http_status == (404 if code == "model_not_found" else 400)
    assert error.message.startswith(name) and len(error.message) < 300


@pytest.mark.parametrize(("name", "given", "code"), refused(SHARED + COMPLETION))
def test_completion_refuses(name: str, given: object, code: str) -> None:
    error = refused_completion(**{name: given})
    assert (error.code, error.param) == (code, name)
    assert error.message.startswith(name) and len(error.message) < 300


@pytest.mark.parametrize("name", [f.name for f in SHARED + CHAT] + ["stream_options", "best_of", "priority"])
def test_null_is_absent_in_chat(name: str) -> None:
    request = chat(**{name: None})
    assert getattr(request, name) == getattr(chat(), name)
    assert request.ignored_fields == ()


@pytest.mark.parametrize("name", [f.name for f in SHARED + COMPLETION if f.name != "prompt"])
def test_null_is_absent_in_completions(name: str) -> None:
    assert getattr(completion(**{name: None}), name) == getattr(completion(), name)


def test_every_field_of_the_models_is_in_these_tables() -> None:
    elsewhere = {"stream_options", "best_of", "priority"}
    assert set(ChatRequest.model_fields) == {f.name for f in SHARED + CHAT} | elsewhere | {"messages"}
    assert set(CompletionRequest.model_fields) == {f.name for f in SHARED + COMPLETION} | elsewhere


def test_both_models_describe_themselves_for_the_api_page() -> None:
    for model, required in ((ChatRequest, "messages"), (CompletionRequest, "prompt")):
        schema = model.model_json_schema(by_alias=True)
        assert schema["required"] == [required]
        assert schema["properties"]["temperature"]["anyOf"][0]["maximum"] == 2.0


@pytest.mark.parametrize("value", [-1, TOKENS, VOCAB - 1, VOCAB, 2**31, 2**63, 10**30])
def test_a24_out_of_vocabulary_ids_are_refused_in_every_id_field(value: int) -> None:
    for error, param in (
        (refused_chat(stop_token_ids=[1, value]), "stop_token_ids"),
        (refused_chat(logit_bias={"1": 1, str(value): 1}), "logit_bias"),
        (refused_completion(stop_token_ids=[1, value]), "stop_token_ids"),
        (refused_completion(logit_bias={str(value): 1}), "logit_bias"),
        (refused_completion(prompt=[1, value]), "prompt"),
        (refused_completion(prompt=[[1], [2, value]]), "prompt"),
    ):
        assert (error.http_status, error.code, error.param) == (400, "invalid_token_id", param)
    assert completion(prompt=[0, TOKENS - 1]).prompts == ((0, TOKENS - 1),)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, "absent"), (0, INT_LOW), (-1, INT_LOW), (1.0, 1), ("5", TYPE), (2**31, 2**31), (True, TYPE), (1.5, TYPE)],
)
def test_a36_max_tokens_has_one_meaning_on_both_routes(value: object, expected: object) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        if isinstance(expected, str) and expected != "absent":
            assert refused_chat(**{name: value}).code == expected
            assert refused_completion(**{name: value}).code == expected
        else:
            assert chat(**{name: value}).token_limit == (None if expected == "absent" else expected)
            assert completion(**{name: value}).token_limit == (16 if expected == "absent" else expected)


def test_a36_a_limit_below_one_is_refused_with_the_way_out() -> None:
    assert "omit it for no limit" in refused_chat(max_tokens=-1).message
    assert "omit it for 16" in refused_completion(max_tokens=0).message


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).token_limit == 7
    assert chat(max_tokens=5).token_limit == 5


def test_a28_n_is_bounded_by_the_configuration_and_best_of_equals_it() -> None:
    settings = config(max_n=4)
    assert chat(settings, n=4, best_of=4, temperature=0).n == 4
    assert refused_chat(settings, n=5).code == INT_HIGH
    assert refused_completion(settings, n=2, best_of=3).code == UNSUPPORTED
    assert refused_completion(best_of=2).param == "best_of"
    assert refused_completion(best_of="1").code == TYPE
    assert completion(best_of=1).ignored_fields == ("best_of",)


def test_stream_options_need_stream() -> None:
    for stream in ({}, {"stream": False}, {"stream": None}):
        error = refused_chat(stream_options={"include_usage": True}, **stream)
        assert (error.code, error.param) == (VALUE, "stream_options")
    assert refused_chat(stream=True, stream_options=[]).code == TYPE
    wrong = refused_completion(stream=True, stream_options={"include_usage": 1})
    assert (wrong.code, wrong.param) == (TYPE, "stream_options.include_usage")


def test_usage_in_streams() -> None:
    def usage(**options: object) -> tuple[bool, bool]:
        request = chat(stream=True, stream_options=options)
        return request.include_usage, request.continuous_usage

    assert usage() == usage(include_usage=None) == (False, False)
    assert usage(include_usage=True) == (True, False)
    assert usage(include_usage=True, continuous_usage_stats=True) == (True, True)
    assert usage(continuous_usage_stats=True) == (False, False)
    assert (chat().include_usage, chat().continuous_usage) == (False, False)


def test_min_tokens_stay_below_the_limit() -> None:
    assert chat(min_tokens=10**6).min_tokens == 10**6  # no limit given: decided when the prompt is counted
    assert chat(min_tokens=5, max_tokens=5).min_tokens == 5
    for error in (
        refused_chat(min_tokens=6, max_tokens=5),
        refused_chat(min_tokens=6, max_tokens=10, max_completion_tokens=5),
        refused_completion(min_tokens=17),
    ):
        assert (error.code, error.param) == (INT_HIGH, "min_tokens")
    assert refused_completion(min_tokens=17, max_tokens="x").message.count(";") == 0  # one mistake, one report


def test_priority_needs_the_setting() -> None:
    on = config(priority=True)
    assert chat().priority == chat(priority=0).priority == 0
    assert chat(on, priority=-(2**31)).priority == -(2**31)
    assert chat(on, priority=2**31 - 1.0).priority == 2**31 - 1
    assert refused_chat(priority=1).param == "priority"
    assert refused_chat(on, priority=2**31).code == INT_HIGH
    assert refused_chat(on, priority=-(2**31) - 1).code == INT_LOW
    assert refused_chat(on, priority="1").code == TYPE


def test_timeout_is_bounded_by_the_configuration() -> None:
    settings = config(max_timeout=10)
    assert chat(settings, timeout_s=10).timeout_s == 10.0
    assert refused_chat(settings, timeout_s=10.1).code == HIGH
    assert parse_timeout_ms("2500", settings) == 2.5
    for text in ("", "abc", "0", "-5", "nan", "inf", "10001"):
        with pytest.raises(InvalidRequest) as caught:
            parse_timeout_ms(text, settings)
        assert caught.value.param == "x-request-timeout-ms"


def test_second_names_of_fields() -> None:
    request = chat(extra_key="s", rid="id-1", no_stop_trim=True, safety_identifier="u")
    assert (request.cache_salt, request.label, request.include_stop_str_in_output, request.user) == (
        "s",
        "id-1",
        True,
        "u",
    )
    assert request.ignored_fields == ()
    both = chat(extra_key="s", cache_salt="t", rid="a", request_id="b")
    assert (both.cache_salt, both.label) == ("t", "b")
    assert both.ignored_fields == ("extra_key", "rid")
    assert chat(extra_key="s", cache_salt=None).cache_salt == "s"
    for name in ("extra_key", "rid", "no_stop_trim", "safety_identifier"):
        assert (refused_chat(**{name: 5}).code, refused_chat(**{name: 5}).param) == (TYPE, name)


def test_a_label_is_the_clients_id_if_it_is_usable() -> None:
    assert chat(request_id="A-b.c_d:9").label == "A-b.c_d:9"
    for text in ("", "two words", "x" * 129, "a\n", "é"):
        assert chat(request_id=text).label is None
        assert not is_request_id(text)
    assert chat().label is None


def test_model_defaults_to_the_served_name() -> None:
    assert chat().model == completion(model=None).model == "m"
    error = refused_completion(model="x" * 5000)
    assert (error.http_status, error.code, error.param) == (404, "model_not_found", "model")
    assert len(error.message) < 200


def test_request_templates_need_trust() -> None:
    assert chat(config(trust_request_chat_template=True), chat_template="{{ 1 }}").chat_template == "{{ 1 }}"


def test_top_logprobs_need_logprobs() -> None:
    for fields in ({}, {"logprobs": False}):
        error = refused_chat(top_logprobs=5, **fields)
        assert (error.code, error.param) == (VALUE, "top_logprobs")
    assert refused_chat(logprobs="x", top_logprobs=5).message.count(";") == 0  # one mistake, one report
    assert chat(logprobs=True, top_logprobs=5).top_logprobs == 5


@pytest.mark.parametrize(
    ("request_", "logprobs", "prompt_logprobs"),
    [
        (chat(), -1, -1),
        (chat(logprobs=True), 0, -1),
        (chat(logprobs=True, top_logprobs=0), 0, -1),
        (chat(logprobs=True, top_logprobs=5, prompt_logprobs=3), 5, 3),
        (completion(), -1, -1),
        (completion(logprobs=0), 0, -1),
        (completion(logprobs=5), 5, -1),
        (completion(logprobs=5, echo=True), 5, 5),
        (completion(logprobs=5, echo=True, prompt_logprobs=2), 5, 5),
        (completion(logprobs=1, echo=True, prompt_logprobs=2), 1, 2),
        (completion(echo=True), -1, -1),
        (completion(prompt_logprobs=0), -1, 0),
    ],
)
def test_what_the_engine_is_asked_for(
    request_: ChatRequest | CompletionRequest, logprobs: int, prompt_logprobs: int
) -> None:
    sampling = request_.sampling(4, 0, FACTS)
    assert (sampling.logprobs, sampling.prompt_logprobs) == (logprobs, prompt_logprobs)


def test_prompt_logprobs_are_not_streamed() -> None:
    for error in (refused_chat(prompt_logprobs=1, stream=True), refused_completion(prompt_logprobs=1, stream=True)):
        assert (error.code, error.param) == (VALUE, "prompt_logprobs")


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_limit_of_zero_is_for_completions_with_echo(name: str) -> None:
    scoring = completion(echo=True, **{name: 0})
    assert scoring.scoring and scoring.token_limit == 1
    assert not completion(echo=True).scoring and completion(echo=True).token_limit == 16
    for error in (refused_completion(**{name: 0}), refused_completion(echo=False, **{name: 0})):
        assert (error.code, error.param) == (INT_LOW, name)
        assert "echo" in error.message and "omit it for 16" in error.message
    assert refused_chat(echo=True, **{name: 0}).code == INT_LOW
    assert refused_completion(echo=True, **{name: -1}).code == INT_LOW


def test_chat_only_fields_on_completions_point_to_chat() -> None:
    assert "/v1/chat/completions" in refused_completion(messages=[USER]).message
    assert "use tools" in refused_chat(functions=[]).message


def test_prompts_and_messages_are_required() -> None:
    bodies: list[dict[str, object]] = [{}, {"prompt": None, "messages": None}]
    for body in bodies:
        for parse, param in ((parse_chat, "messages"), (parse_completion, "prompt")):
            with pytest.raises(InvalidRequest) as caught:
                parse(body, config(), FACTS)
            assert (caught.value.code, caught.value.param) == ("missing_required_parameter", param)
