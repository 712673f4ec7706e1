"""http-api sections 3, 8 and 9: bodies of answers that are not streamed."""

from __future__ import annotations

import json

import pytest

from overlap_serve.openai.response import (
    AnswerHead,
    ChoiceResult,
    Usage,
    chat_completion,
    client_stop_reason,
    model_card,
    model_list,
    text_completion,
    usage_body,
)
from overlap_serve.sampling import FinishReason

HEAD = AnswerHead("chatcmpl-" + "0" * 32, 1760000000, "m", "fp_0123456789ab")
USAGE = Usage(prompt_tokens=9, completion_tokens=2, cached_tokens=4)


def choice(
    index: int, text: str = "Hello", finish: FinishReason = "stop", reason: str | int | None = None
) -> ChoiceResult:
    return ChoiceResult(index, text, finish, reason, (5, 2))


def test_a3_chat_completion_has_the_shape_of_the_specification() -> None:
    assert chat_completion(HEAD, [choice(0)], USAGE) == {
        "id": HEAD.id,
        "object": "chat.completion",
        "created": 1760000000,
        "model": "m",
        "system_fingerprint": "fp_0123456789ab",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 9,
            "completion_tokens": 2,
            "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 4},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


def test_text_completion_has_the_shape_of_the_specification() -> None:
    body = text_completion(HEAD, [choice(0, finish="length")], USAGE)
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]


def test_a28_choices_are_complete_and_in_order() -> None:
    body = chat_completion(HEAD, [choice(2, "c"), choice(0, "a"), choice(1, "b")], USAGE)
    choices = body["choices"]
    assert isinstance(choices, list)
    assert [c["message"]["content"] for c in choices] == ["a", "b", "c"]
    for broken in ([choice(0), choice(2)], [choice(0), choice(0)]):
        with pytest.raises(AssertionError):
            text_completion(HEAD, broken, USAGE)


def test_a28_cached_tokens_never_exceed_the_prompt() -> None:
    assert usage_body(Usage(9, 2, 72))["prompt_tokens_details"] == {"cached_tokens": 9}
    assert usage_body(Usage(9, 2, -1))["prompt_tokens_details"] == {"cached_tokens": 0}


def test_token_ids_are_returned_on_demand() -> None:
    chat = chat_completion(HEAD, [choice(0)], USAGE, prompt_token_ids=[[1, 2]])
    assert chat["prompt_token_ids"] == [1, 2]
    assert chat["choices"][0]["token_ids"] == [5, 2]  # type: ignore[index]
    text = text_completion(HEAD, [choice(i) for i in range(4)], USAGE, prompt_token_ids=[[1], [2, 3]])
    assert [c["prompt_token_ids"] for c in text["choices"]] == [[1], [1], [2, 3], [2, 3]]  # type: ignore[attr-defined]
    assert "token_ids" not in json.dumps(chat_completion(HEAD, [choice(0)], USAGE))


@pytest.mark.parametrize(
    ("finish", "reason", "strings", "seen"),
    [
        ("stop", None, {}, None),
        ("stop", "END", {}, "END"),
        ("stop", 5, {}, 5),
        ("stop", 5, {5: "<|end|>"}, "<|end|>"),
        ("length", None, {}, None),
        ("length", 5, {}, None),
        ("abort", "client", {}, "client_abort"),
        ("abort", "api", {}, "client_abort"),
        ("abort", "deadline", {}, "deadline"),
        ("abort", "shutdown", {}, "shutdown"),
    ],
)
def test_stop_reason_names(
    finish: FinishReason, reason: str | int | None, strings: dict[int, str], seen: object
) -> None:
    assert client_stop_reason(finish, reason, strings) == seen
    body = chat_completion(HEAD, [choice(0, finish=finish, reason=reason)], USAGE, stop_strings=strings)
    assert body["choices"][0]["stop_reason"] == seen  # type: ignore[index]
    assert body["choices"][0]["finish_reason"] == finish  # type: ignore[index]


def test_an_error_is_never_a_finish_reason() -> None:
    with pytest.raises(AssertionError):
        chat_completion(HEAD, [choice(0, finish="error")], USAGE)


def test_models() -> None:
    card = model_card(id="qwen3", created=1760000000, root="Qwen/Qwen3-0.6B", max_model_len=32768)
    assert model_list([card]) == {
        "object": "list",
        "data": [
            {
                "id": "qwen3",
                "object": "model",
                "created": 1760000000,
                "owned_by": "overlap_serve",
                "root": "Qwen/Qwen3-0.6B",
                "parent": None,
                "max_model_len": 32768,
            }
        ],
    }
