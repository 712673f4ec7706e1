"""http-api sections 4 and 8: what a streaming client receives."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_serve.errors import InternalError
from overlap_serve.openai.response import AnswerHead, ChoiceResult, Usage, chat_completion, text_completion
from overlap_serve.openai.stream import PING, ChatChunks, CompletionChunks

HEAD = AnswerHead("chatcmpl-" + "0" * 32, 1760000000, 'm"ö', "fp_0123456789ab")
USAGE = Usage(9, 2, 0)
IDENTITY = {
    "id": HEAD.id,
    "object": "chat.completion.chunk",
    "created": HEAD.created,
    "model": HEAD.model,
    "system_fingerprint": HEAD.system_fingerprint,
}


def events(stream: bytes) -> list[Any]:
    """Strict reading: framing, one line per event, ASCII, no NaN. `[DONE]` stays a string."""
    assert stream.endswith(b"\n\n") or stream == b""
    parsed: list[Any] = []
    for event in stream.decode("ascii").split("\n\n")[:-1]:
        assert event.startswith("data: ") and len(event.splitlines()) == 1
        data = event.removeprefix("data: ")
        parsed.append(data if data == "[DONE]" else json.loads(data, parse_constant=_no_constant))
    return parsed


def _no_constant(name: str) -> NoReturn:
    raise AssertionError(f"{name} is not JSON")


def chunk(choice: dict[str, object], **more: object) -> dict[str, object]:
    return {**IDENTITY, "choices": [choice], **more}


def test_chat_chunks_are_those_of_the_specification() -> None:
    chunks = ChatChunks(HEAD, include_usage=True)
    stream = chunks.delta(0, "Hel", (5,)) + chunks.delta(0, "lo", (6,), "stop") + chunks.finish(USAGE)
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 2,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    role = {"role": "assistant", "content": ""}
    assert events(stream) == [
        chunk({"index": 0, "delta": role, "logprobs": None, "finish_reason": None}, usage=None),
        chunk({"index": 0, "delta": {"content": "Hel"}, "logprobs": None, "finish_reason": None}, usage=None),
        chunk({"index": 0, "delta": {"content": "lo"}, "logprobs": None, "finish_reason": None}, usage=None),
        chunk({"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": None}, usage=None),
        {**IDENTITY, "choices": [], "usage": usage},
        "[DONE]",
    ]


def test_completion_chunks_have_text_and_no_role() -> None:
    chunks = CompletionChunks(HEAD)
    stream = chunks.delta(1, "Hi", (5,)) + chunks.delta(1, "", (2,), "stop", 2) + chunks.finish(USAGE)
    identity = {**IDENTITY, "object": "text_completion"}
    assert events(stream) == [
        {**identity, "choices": [{"index": 1, "text": "Hi", "logprobs": None, "finish_reason": None}]},
        {
            **identity,
            "choices": [{"index": 1, "text": "", "logprobs": None, "finish_reason": "stop", "stop_reason": 2}],
        },
        "[DONE]",
    ]


def test_without_include_usage_no_chunk_has_the_key() -> None:
    chunks = ChatChunks(HEAD, continuous_usage=True)
    stream = chunks.delta(0, "a", (5,), "length") + chunks.finish(USAGE)
    assert all("usage" not in event for event in events(stream)[:-1])
    assert len(events(stream)) == 4


def test_a_token_without_text_sends_nothing_but_the_first_sends_the_role() -> None:
    chunks = ChatChunks(HEAD)
    assert len(events(chunks.delta(0, "", (5,)))) == 1
    assert chunks.delta(0, "", (6,)) == b""
    completions = CompletionChunks(HEAD)
    assert completions.delta(0, "", (5,)) == b""


def test_a_finish_without_any_text_is_role_and_finish() -> None:
    got = events(ChatChunks(HEAD).delta(0, "", (2,), "stop"))
    assert [event["choices"][0]["delta"] for event in got] == [{"role": "assistant", "content": ""}, {}]


def test_continuous_usage_is_on_every_chunk_and_totals_never_fall() -> None:
    chunks = ChatChunks(HEAD, include_usage=True, continuous_usage=True)
    stream = chunks.delta(0, "a", (5,), usage=Usage(9, 1, 0))
    stream += chunks.delta(0, "", (6,), usage=Usage(9, 2, 0))  # no text, but the totals moved
    stream += chunks.delta(0, "b", (7,), "length", usage=Usage(9, 3, 0)) + chunks.finish(Usage(9, 3, 0))
    totals = [event["usage"]["completion_tokens"] for event in events(stream)[:-1]]
    assert totals == [1, 1, 2, 3, 3, 3]
    with pytest.raises(AssertionError):
        ChatChunks(HEAD, include_usage=True, continuous_usage=True).delta(0, "a", (5,))


def test_token_ids_come_with_their_text_and_prompt_ids_once() -> None:
    chunks = ChatChunks(HEAD, prompt_token_ids=[[1, 2]])
    got = events(chunks.delta(0, "a", (5, 6)) + chunks.delta(1, "b", (7,)) + chunks.delta(0, "", (8,), "stop"))
    assert [event.get("prompt_token_ids") for event in got] == [[1, 2], None, None, None, None, None]
    assert [event["choices"][0].get("token_ids") for event in got] == [None, [5, 6], None, [7], [8], None]
    completions = CompletionChunks(HEAD, prompt_token_ids=[[1], [2, 3]], n=2)
    firsts = [events(completions.delta(index, "", ()))[0]["choices"][0] for index in range(4)]
    assert [first["prompt_token_ids"] for first in firsts] == [[1], [1], [2, 3], [2, 3]]


LISTS = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5}], "text_offset": [0]}


def test_logprobs_travel_with_the_text_of_their_chunk_and_never_on_the_last() -> None:
    for chunks in (ChatChunks(HEAD), CompletionChunks(HEAD)):
        stream = chunks.delta(0, "a", (5,), logprobs=LISTS) + chunks.delta(0, "", (2,), "stop", logprobs=LISTS)
        got = [event["choices"][0] for event in events(stream)]
        assert [choice["logprobs"] for choice in got][-3:] == [LISTS, LISTS, None]
        assert [choice["finish_reason"] for choice in got][-3:] == [None, None, "stop"]


def test_a_token_without_text_is_sent_for_its_logprob() -> None:
    chunks = ChatChunks(HEAD)
    got = events(chunks.delta(0, "", (5,), logprobs={"content": [1]}))
    assert [event["choices"][0]["delta"]["content"] for event in got] == ["", ""]
    assert chunks.delta(0, "", (), logprobs={"content": []}) == b""


def test_echo_is_the_first_chunk_of_each_choice() -> None:
    chunks = CompletionChunks(HEAD, include_usage=True, prompt_token_ids=[[1], [2]], n=1)
    stream = chunks.begin(1, "prompt", LISTS) + chunks.delta(1, "a", (5,), logprobs=LISTS)
    first, second = (event["choices"][0] for event in events(stream))
    assert first == {
        "index": 1,
        "text": "prompt",
        "logprobs": LISTS,
        "finish_reason": None,
        "prompt_token_ids": [2],
    }
    assert (second["text"], second["token_ids"]) == ("a", [5]) and "prompt_token_ids" not in second
    assert all(event["usage"] is None for event in events(stream))
    with pytest.raises(AssertionError):
        chunks.begin(1, "prompt")


def test_an_error_event_is_followed_by_done_alone() -> None:
    chunks = ChatChunks(HEAD, include_usage=True)
    chunks.delta(0, "a", (5,))
    error = InternalError("it broke")
    assert events(chunks.error(error)) == [error.envelope(), "[DONE]"]


def test_an_abort_with_output_says_why() -> None:
    last = events(ChatChunks(HEAD).delta(0, "a", (5,), "abort", "api"))[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("abort", "client_abort")


def test_a_special_token_given_as_stop_string_is_reported_as_the_string() -> None:
    chunks = ChatChunks(HEAD, stop_strings={8: "<|sep|>"})
    assert events(chunks.delta(0, "", (8,), "stop", 8))[-1]["choices"][0]["stop_reason"] == "<|sep|>"


def test_a_choice_ends_once() -> None:
    chunks = ChatChunks(HEAD)
    chunks.delta(0, "a", (5,), "stop")
    with pytest.raises(AssertionError):
        chunks.delta(0, "b", (6,))
    with pytest.raises(AssertionError):
        chunks.delta(1, "b", (6,), "error")


def test_keep_alive_is_a_comment() -> None:
    assert PING == b": keep-alive\n\n"


# U+0085, U+2028 and friends break lines for readers that use str.splitlines.
TEXT = st.text(max_size=6) | st.sampled_from(
    ["\n\n", "\r", "\x85", "\u2028\u2029", "\x0b\x1c", '"\\', "😀", "\x00\x7f", "data: x"]
)
DELTAS = st.lists(st.tuples(st.integers(0, 2), TEXT, st.lists(st.integers(0, 99), max_size=3)), max_size=12)


@given(deltas=DELTAS, usage=st.booleans(), continuous=st.booleans(), ids=st.booleans())
def test_joined_chunks_equal_the_answer_that_is_not_streamed(
    deltas: list[tuple[int, str, list[int]]], usage: bool, continuous: bool, ids: bool
) -> None:
    choices = [
        ChoiceResult(
            index,
            "".join(text for i, text, _ in deltas if i == index),
            "stop",
            "END",
            [token for i, _, tokens in deltas if i == index for token in tokens],
        )
        for index in range(3)
    ]
    prompts = [[1, 2]] if ids else None
    for kind in ("chat", "text"):
        options: dict[str, Any] = {
            "include_usage": usage,
            "continuous_usage": continuous,
            "prompt_token_ids": prompts,
            "n": 3,
        }
        chunks = ChatChunks(HEAD, **options) if kind == "chat" else CompletionChunks(HEAD, **options)
        build = chat_completion if kind == "chat" else text_completion
        whole: Any = build(HEAD, choices, USAGE, prompt_token_ids=prompts)
        stream = b"".join(chunks.delta(index, text, tokens, usage=USAGE) for index, text, tokens in deltas)
        stream += b"".join(chunks.delta(index, "", (), "stop", "END", USAGE) for index in range(3))
        got = events(stream + chunks.finish(USAGE))
        assert got[-1] == "[DONE]"
        assert all(len(event["choices"]) == 1 for event in got[: -2 if usage else -1])
        if usage:
            assert got[-2]["usage"] == whole["usage"]
        for expected in whole["choices"]:
            parts = [
                e["choices"][0] for e in got[:-1] if e["choices"] and e["choices"][0]["index"] == expected["index"]
            ]
            assert joined_text(parts, kind) == (expected["message"]["content"] if kind == "chat" else expected["text"])
            assert [t for part in parts for t in part.get("token_ids", [])] == expected.get("token_ids", [])
            ends = [part["finish_reason"] for part in parts]
            assert ends == [None] * (len(parts) - 1) + [expected["finish_reason"]]
            assert parts[-1]["stop_reason"] == expected["stop_reason"]
            if kind == "chat":
                assert ["role" in part["delta"] for part in parts] == [True] + [False] * (len(parts) - 1)


def joined_text(parts: list[dict[str, Any]], kind: str) -> str:
    return "".join(part["delta"].get("content", "") if kind == "chat" else part["text"] for part in parts)
