"""http-api section 2.2: which messages are accepted, and what a chat template sees of them."""

from __future__ import annotations

import pytest

from tests.openai.common import USER, chat, config, refused_chat

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def seen(message: dict[str, object], *, keep_parts: bool = False, developer_role: bool = False) -> dict[str, object]:
    request = chat(messages=[message])
    return request.template_messages(keep_parts=keep_parts, developer_role=developer_role)[0]


@pytest.mark.parametrize(
    ("message", "code", "path"),
    [
        ({"role": "robot", "content": "a"}, "invalid_value", ".role"),
        ({"role": 1, "content": "a"}, "invalid_type", ".role"),
        ({"role": [], "content": "a"}, "invalid_type", ".role"),
        ({"content": "a"}, "missing_required_parameter", ".role"),
        ({"role": None, "content": "a"}, "missing_required_parameter", ".role"),
        ({"role": "user"}, "missing_required_parameter", ".content"),
        ({"role": "user", "content": None}, "missing_required_parameter", ".content"),
        ({"role": "assistant", "content": None}, "missing_required_parameter", ".content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "missing_required_parameter", ".content"),
        ({"role": "user", "content": None, "tool_calls": [CALL]}, "missing_required_parameter", ".content"),
        ({"role": "user", "content": 1}, "invalid_type", ".content"),
        ({"role": "user", "content": {}}, "invalid_type", ".content"),
        ({"role": "user", "content": []}, "empty_array", ".content"),
        ({"role": "user", "content": ["a"]}, "invalid_type", ".content[0]"),
        ({"role": "user", "content": [{"text": "a"}]}, "missing_required_parameter", ".content[0].type"),
        ({"role": "user", "content": [{"type": 1}]}, "invalid_type", ".content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "missing_required_parameter", ".content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "invalid_type", ".content[0].text"),
        *(
            (
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind, kind: {}}]},
                "unsupported_content_part",
                ".content[1]",
            )
            for kind in ("image_url", "input_audio", "video_url", "file", "hologram")
        ),
        ({"role": "tool", "content": "a"}, "missing_required_parameter", ".tool_call_id"),
        ({"role": "tool", "content": "a", "tool_call_id": 1}, "invalid_type", ".tool_call_id"),
        ({"role": "user", "content": "a", "name": 1}, "invalid_type", ".name"),
        ({"role": "assistant", "content": "a", "reasoning": 1}, "invalid_type", ".reasoning"),
        ({"role": "assistant", "tool_calls": {}}, "invalid_type", ".tool_calls"),
        (
            {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": None}]},
            "missing_required_parameter",
            ".tool_calls[0].id",
        ),
        (
            {"role": "assistant", "content": "", "tool_calls": [{**CALL, "type": "x"}]},
            "invalid_value",
            ".tool_calls[0].type",
        ),
        (
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [CALL, {**CALL, "function": {"name": "f", "arguments": {}}}],
            },
            "invalid_type",
            ".tool_calls[1].function.arguments",
        ),
        ("hi", "invalid_type", ""),
        (None, "invalid_type", ""),
    ],
)
def test_a33_a_bad_message_is_refused_at_its_place(message: object, code: str, path: str) -> None:
    error = refused_chat(messages=[USER, message])
    assert (error.http_status, error.code, error.param) == (400, code, f"messages[1]{path}")


def test_the_number_of_messages_is_bounded_before_they_are_looked_at() -> None:
    settings = config(max_messages=3)
    assert len(chat(settings, messages=[USER] * 3).messages) == 3
    error = refused_chat(settings, messages=["broken"] * 4)
    assert (error.code, error.param) == ("array_above_max_length", "messages")
    assert refused_chat(messages=[]).code == "empty_array"
    assert refused_chat(messages={}).code == "invalid_type"
    assert refused_chat(messages="hi").code == "invalid_type"


def test_text_parts_are_joined_without_separator_or_kept_for_templates_that_iterate() -> None:
    parts: dict[str, object] = {
        "role": "user",
        "content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}],
    }
    assert seen(parts) == {"role": "user", "content": "ab"}
    kept = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert seen(parts, keep_parts=True)["content"] == kept
    assert seen({"role": "user", "content": "a"}, keep_parts=True)["content"] == [{"type": "text", "text": "a"}]


def test_roles_of_the_template() -> None:
    assert seen({"role": "developer", "content": "a"})["role"] == "system"
    assert seen({"role": "developer", "content": "a"}, developer_role=True)["role"] == "developer"
    assert seen({"role": "function", "name": "f", "content": "a"}) == {"role": "tool", "content": "a", "name": "f"}
    assert seen({"role": "tool", "tool_call_id": "c1", "content": "a"})["tool_call_id"] == "c1"


@pytest.mark.parametrize("calls", [[], None])
def test_a27_empty_tool_calls_are_removed(calls: object) -> None:
    assert seen({"role": "assistant", "content": "a", "tool_calls": calls}) == {"role": "assistant", "content": "a"}


def test_a27_null_content_is_empty_text_not_the_word_none() -> None:
    message = seen({"role": "assistant", "content": None, "tool_calls": [CALL]})
    assert message["content"] == ""
    assert seen({"role": "assistant", "refusal": "no"})["content"] == "no"


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ('{"x": 1}', {"x": 1}),
        ("{}", {}),
        ("", ""),
        ("{", "{"),
        ("[1]", "[1]"),
        ('{"x": NaN}', '{"x": NaN}'),
        ("[" * 5000, "[" * 5000),
    ],
)
def test_arguments_are_a_mapping_where_they_are_an_object(text: str, given: object) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": text}}
    message = seen({"role": "assistant", "tool_calls": [call]})
    assert message["tool_calls"] == [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": given}}]


def test_reasoning_reaches_the_template_under_both_names() -> None:
    for name in ("reasoning", "reasoning_content"):
        message = seen({"role": "assistant", "content": "a", name: "hm"})
        assert message["reasoning"] == message["reasoning_content"] == "hm"
