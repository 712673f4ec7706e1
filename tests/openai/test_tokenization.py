"""http-api section 11: bodies of /tokenize and /detokenize."""

from __future__ import annotations

import pytest

from overlap_serve.errors import InvalidRequest
from overlap_serve.openai.tokenization import (
    DetokenizeRequest,
    TokenizeChat,
    TokenizeText,
    detokenize_body,
    parse_detokenize,
    parse_tokenize,
    tokenize_body,
)
from tests.openai.common import FACTS, TOKENS, USER, config


def tokenize(**fields: object) -> TokenizeText | TokenizeChat:
    return parse_tokenize(fields, config(), FACTS)


def detokenize(**fields: object) -> DetokenizeRequest:
    return parse_detokenize(fields, config(), FACTS)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({}, "missing_required_parameter", "prompt"),
        ({"prompt": None, "messages": None}, "missing_required_parameter", "prompt"),
        ({"prompt": "a", "messages": [USER]}, "invalid_value", "messages"),
        ({"prompt": 5}, "invalid_type", "prompt"),
        ({"prompt": [1, 2]}, "invalid_type", "prompt"),
        ({"prompt": ["a"] * 1025}, "array_above_max_length", "prompt"),
        ({"prompt": "a", "add_special_tokens": 1}, "invalid_type", "add_special_tokens"),
        ({"prompt": "a", "model": "other"}, "model_not_found", "model"),
        ({"messages": []}, "empty_array", "messages"),
        ({"messages": [USER], "continue_final_message": True}, "invalid_value", "continue_final_message"),
        ({"messages": [USER], "tools": [{}]}, "unsupported_parameter", "tools"),
        ({"messages": [USER], "chat_template": "{{ 1 }}"}, "unsupported_parameter", "chat_template"),
    ],
)
def test_tokenize_refuses(fields: dict[str, object], code: str, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tokenize(**fields)
    assert (caught.value.code, caught.value.param) == (code, param)


def test_tokenize_defaults_are_those_of_the_generate_routes() -> None:
    text = tokenize(prompt="a")
    assert isinstance(text, TokenizeText) and text.add_special_tokens and not text.many
    assert tokenize(prompt="").texts == ("",)  # type: ignore[union-attr]
    many = tokenize(prompt=["a", "b"])
    assert isinstance(many, TokenizeText) and many.many and many.texts == ("a", "b")
    chat = tokenize(messages=[USER], return_token_strs=True)
    assert isinstance(chat, TokenizeChat) and not chat.add_special_tokens and chat.generation_prompt
    assert chat.return_token_strs


def test_a_whole_chat_body_may_be_counted_and_what_does_not_matter_is_reported() -> None:
    chat = tokenize(messages=[USER], temperature=9, stream=True, zzz=1, store=True)
    assert chat.ignored_fields == ("temperature", "stream", "zzz")
    assert tokenize(prompt="a", zzz=1).ignored_fields == ("zzz",)
    with pytest.raises(InvalidRequest) as caught:
        parse_tokenize({"prompt": "a", "zzz": 1}, config(strict_fields=True), FACTS)
    assert caught.value.code == "unknown_parameter"


@pytest.mark.parametrize(
    ("tokens", "sequences", "many"),
    [
        ([], ((),), False),
        ([1, 2.0], ((1, 2),), False),
        ([[1], [], [2, 3]], ((1,), (), (2, 3)), True),
        ([[]], ((),), True),
    ],
)
def test_detokenize_takes_ids_or_lists_of_them(tokens: object, sequences: object, many: bool) -> None:
    request = detokenize(tokens=tokens)
    assert (request.sequences, request.many, request.skip_special_tokens) == (sequences, many, False)


@pytest.mark.parametrize(
    ("tokens", "code"),
    [
        ([-1], "invalid_token_id"),
        ([TOKENS], "invalid_token_id"),
        ([[1], [2**63]], "invalid_token_id"),
        (["1"], "invalid_type"),
        ([1, [2]], "invalid_type"),
        ([True], "invalid_type"),
        ("1", "invalid_type"),
        (None, "missing_required_parameter"),
        ([[1]] * 1025, "array_above_max_length"),
    ],
)
def test_detokenize_refuses(tokens: object, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        detokenize(tokens=tokens)
    assert (caught.value.code, caught.value.param) == (code, "tokens")


def test_answers_have_the_shapes_that_both_kinds_of_clients_read() -> None:
    assert tokenize_body([[1, 2]], None, many=False, max_model_len=9) == {
        "count": 2,
        "max_model_len": 9,
        "tokens": [1, 2],
        "token_strs": None,
    }
    many = tokenize_body([[1], [2, 3]], [["a"], ["b", "c"]], many=True, max_model_len=9)
    assert (many["count"], many["tokens"], many["token_strs"]) == ([1, 2], [[1], [2, 3]], [["a"], ["b", "c"]])
    assert tokenize_body([], None, many=True, max_model_len=9)["count"] == []
    assert detokenize_body(["a"], many=False) == {"prompt": "a", "text": "a"}
    assert detokenize_body(["a", "b"], many=True)["text"] == ["a", "b"]
