"""http-api section 7: the shapes of log-probabilities, true bytes, offsets; and what `echo` repeats."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_serve.openai.echo import echo_of
from overlap_serve.openai.logprobs import (
    FLOOR,
    Offsets,
    TokenTexts,
    chat_logprobs,
    prompt_logprobs,
    text_logprobs,
    unknown_logprobs,
)
from overlap_serve.sampling import TokenLogprob
from overlap_serve.text.tokenizer import Tokenizer
from tests.text.built import byte_fallback, byte_level, wrapped

BYTES = Tokenizer.bytes()
BOS, EOS = 256, 257
TEXTS = TokenTexts(BYTES, BYTES.special_ids)
SHOWN = TokenTexts(BYTES, frozenset())


def strict(value: object) -> Any:
    """What a strict JSON reader gets."""
    return json.loads(json.dumps(value, allow_nan=False))


def entry(token_id: int, logprob: float | None = -1.0, *top: tuple[int, float]) -> TokenLogprob:
    return TokenLogprob(token_id, logprob, top)


def test_chat_entry_has_exactly_the_alternatives_asked_for() -> None:
    tokens = [entry(65, -0.5, (66, -0.25), (65, -0.5), (67, -3.0))]
    assert strict(chat_logprobs(tokens, 2, TEXTS)) == {
        "content": [
            {
                "token": "A",
                "logprob": -0.5,
                "bytes": [65],
                "top_logprobs": [
                    {"token": "B", "logprob": -0.25, "bytes": [66]},
                    {"token": "A", "logprob": -0.5, "bytes": [65]},
                ],
            }
        ],
        "refusal": None,
    }
    assert chat_logprobs(tokens, 0, TEXTS)["content"][0]["top_logprobs"] == []  # type: ignore[index]
    assert chat_logprobs([], 0, TEXTS) == {"content": [], "refusal": None}


def test_bytes_of_halves_are_true_and_join_to_the_text() -> None:
    content: Any = chat_logprobs([entry(byte) for byte in "né😀".encode()], 0, TEXTS)["content"]
    assert [item["token"] for item in content] == ["n"] + ["\ufffd"] * 6
    assert bytes(itertools.chain.from_iterable(item["bytes"] for item in content)).decode() == "né😀"


def test_a_token_without_text_in_the_answer_has_no_bytes() -> None:
    assert chat_logprobs([entry(EOS)], 0, TEXTS)["content"][0]["bytes"] is None  # type: ignore[index]
    shown: Any = chat_logprobs([entry(EOS)], 0, SHOWN)["content"]
    assert bytes(shown[0]["bytes"]).decode() == shown[0]["token"] == "<|eos|>"


@pytest.mark.parametrize("value", [-math.inf, math.nan, -1e30])
def test_a21_what_json_cannot_hold_is_the_floor(value: float) -> None:
    tokens = [entry(65, value, (66, value))]
    for shape in (
        chat_logprobs(tokens, 1, TEXTS),
        text_logprobs(tokens, [0], 1, TEXTS),
        prompt_logprobs(tokens, 1, TEXTS),
    ):
        assert str(FLOOR) in json.dumps(strict(shape))


def test_completion_lists_have_one_length_and_dicts_hold_the_token_too() -> None:
    tokens = [entry(65, None), entry(66, -2.0, (67, -0.1), (68, -0.2)), entry(67, -0.1, (67, -0.1), (68, -0.2))]
    assert text_logprobs(tokens, [0, 1, 2], 2, TEXTS) == {
        "tokens": ["A", "B", "C"],
        "token_logprobs": [None, -2.0, -0.1],
        "top_logprobs": [None, {"C": -0.1, "D": -0.2, "B": -2.0}, {"C": -0.1, "D": -0.2}],
        "text_offset": [0, 1, 2],
    }
    assert text_logprobs(tokens, [0, 1, 2], 0, TEXTS)["top_logprobs"] == [None, {"B": -2.0}, {"C": -0.1}]
    with pytest.raises(AssertionError):
        text_logprobs(tokens, [0], 0, TEXTS)


@pytest.mark.parametrize("tops", [((200, -0.1), (201, -0.9)), ((201, -0.1), (200, -0.9))])
def test_of_two_tokens_with_one_text_the_likelier_stays(tops: tuple[tuple[int, float], ...]) -> None:
    lists = text_logprobs([entry(202, -3.0, *tops)], [0], 2, TEXTS)
    assert lists["top_logprobs"] == [{"\ufffd": -0.1}]


def test_prompt_logprobs_are_null_first_then_candidates_by_id() -> None:
    tokens = [entry(BOS, None), entry(65, -2.0, (66, -0.1), (67, -0.5)), entry(66, -0.1, (66, -0.1), (67, -0.5))]
    assert strict(prompt_logprobs(tokens, 1, TEXTS)) == [
        None,
        {
            "66": {"logprob": -0.1, "rank": 1, "decoded_token": "B"},
            "65": {"logprob": -2.0, "rank": None, "decoded_token": "A"},
        },
        {"66": {"logprob": -0.1, "rank": 1, "decoded_token": "B"}},
    ]
    assert prompt_logprobs(tokens, 0, TEXTS)[2] == {"66": {"logprob": -0.1, "rank": 1, "decoded_token": "B"}}
    assert prompt_logprobs(unknown_logprobs([1, 2]), 5, TEXTS) == [None, None]


@given(st.text(max_size=12), st.text(max_size=12), st.integers(0, 40), st.lists(st.integers(0, 40), max_size=4))
def test_offsets_are_where_the_text_of_each_token_begins(prompt: str, text: str, start: int, cuts: list[int]) -> None:
    """Whatever the deltas: a token's offset is the number of complete characters before it."""
    ids = list(text.encode())
    expected = [start + len(bytes(ids[:i]).decode(errors="ignore")) for i in range(len(ids))]
    offsets = Offsets(BYTES, [BOS, *prompt.encode()], start, skip_special_tokens=True)
    bounds = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    got = [offset for low, high in itertools.pairwise(bounds) for offset in offsets.take(map(entry, ids[low:high]))]
    assert got == expected


def test_offset_of_a_hidden_token_is_the_end_of_the_text() -> None:
    offsets = Offsets(BYTES, [], 3, skip_special_tokens=True)
    assert offsets.take([entry(65), entry(EOS), entry(66)]) == [3, 4, 4]
    assert Offsets(BYTES, [], 0, skip_special_tokens=False).take([entry(EOS), entry(66)]) == [0, 7]


@pytest.mark.parametrize("tokenizer", [BYTES, wrapped(byte_level()), wrapped(byte_fallback())])
@pytest.mark.parametrize("text", ["hello there", " héllo  wörld", "你好 世界 😀", ""])
def test_echo_of_a_text_is_the_text_and_offsets_point_into_it(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=True)
    echo = echo_of(tokenizer, ids, text, skip_special_tokens=True, with_offsets=True)
    assert echo.text == text and len(echo.offsets) == len(ids)
    assert list(echo.offsets) == sorted(echo.offsets) and all(0 <= offset <= len(text) for offset in echo.offsets)
    for token_id, (low, high) in zip(ids, itertools.pairwise([*echo.offsets, len(text)]), strict=True):
        shown = tokenizer.token_bytes(token_id).decode(errors="replace")
        if token_id not in tokenizer.special_ids and "\ufffd" not in shown:
            assert shown.strip() in text[low:high] or shown.strip() == ""


def test_echo_shows_special_tokens_where_the_client_wrote_them() -> None:
    ids = BYTES.encode("a<|eos|>b", add_special_tokens=True)
    assert ids == [BOS, 97, EOS, 98]
    echo = echo_of(BYTES, ids, "a<|eos|>b", skip_special_tokens=True, with_offsets=True)
    assert echo.offsets == (0, 0, 1, 8)
    assert echo_of(BYTES, ids, None, skip_special_tokens=True, with_offsets=True).text == "ab"
    shown = echo_of(BYTES, ids, None, skip_special_tokens=False, with_offsets=True)
    assert (shown.text, shown.offsets) == ("<|bos|>a<|eos|>b", (0, 7, 8, 15))
    assert echo_of(BYTES, ids, "x", skip_special_tokens=True, with_offsets=False).offsets == ()
