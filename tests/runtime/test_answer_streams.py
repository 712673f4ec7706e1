"""Answers and prompt streams alone: order of deltas, merging for slow readers, and how an answer ends."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from overlap_serve.errors import ServerUnavailable
from overlap_serve.messages import GenerateRequest, Route, TextDelta
from overlap_serve.runtime.streams import MAX_EVENTS, Answer, PromptStream, merge
from overlap_serve.sampling import FinishReason, SamplingParams, TextParams, TokenLogprob


def prompt(answer: Answer, n: int = 1, base: int = 0, attempt: int = 0) -> PromptStream:
    request = GenerateRequest(
        rid="r",
        attempt=attempt,
        prompt=b"",
        n=n,
        sampling=SamplingParams(max_tokens=9),
        text=TextParams(),
        route=Route("d", "i"),
    )
    return PromptStream(answer, request, base)


def delta(
    index: int, text: str = "", choice: int = 0, finish: FinishReason | None = None, attempt: int = 0
) -> TextDelta:
    """One token for each character."""
    ids = tuple(map(ord, text))
    return TextDelta("r", attempt, choice, index, ids, text, index + len(ids), finish)


def read(answer: Answer) -> list[TextDelta]:
    async def run() -> list[TextDelta]:
        return [event async for batch in answer.batches() for event in batch]

    return asyncio.run(run())


def test_reader_gets_deltas_in_order_until_the_last_choice_has_ended() -> None:
    answer = Answer("a", [3], 2, 0.0)
    stream = prompt(answer, n=2)
    for event in (delta(0, "ab"), delta(0, "x", 1), delta(2, "c", 0, "stop"), delta(1, "y", 1, "length")):
        assert stream.judge(event) == "new"
        stream.push(event, 1.0)
    events = read(answer)
    assert [e.text for e in events if e.choice == 0] == ["ab", "c"]
    assert [e.text for e in events if e.choice == 1] == ["x", "y"]
    assert answer.complete and stream.complete and answer.num_tokens == 5


@pytest.mark.parametrize(
    ("event", "verdict"),
    [
        (delta(3, "d"), "new"),
        (delta(3), "new"),
        (delta(2, "c"), "late"),
        (delta(0, "abc"), "late"),
        (delta(4, "e"), "gap"),
        (delta(3, "d", attempt=1), "late"),
        (delta(0, "x", 1), "new"),
        (delta(0, "x", 2), "late"),
        (delta(0, "x", -1), "late"),
    ],
)
def test_repeated_and_foreign_deltas_are_late_and_missing_ones_a_gap(event: TextDelta, verdict: str) -> None:
    stream = prompt(Answer("a", [3], 2, 0.0), n=2)
    stream.push(delta(0, "abc"), 1.0)
    assert stream.judge(event) == verdict


def test_after_its_end_everything_of_a_choice_is_late() -> None:
    stream = prompt(Answer("a", [3], 2, 0.0), n=2)
    stream.push(delta(0, "abc", 0, "stop"), 1.0)
    assert stream.judge(delta(3, "d")) == "late"
    assert stream.judge(delta(3, "", 0, "abort")) == "late"


def test_choices_of_later_prompts_are_numbered_after_the_earlier_ones() -> None:
    answer = Answer("a", [3, 3], 2, 0.0)
    second = prompt(answer, n=2, base=2)
    second.push(delta(0, "x", 1), 1.0)
    assert answer.choices[3].num_tokens == 1 and answer.choices[1].num_tokens == 0


def test_slow_reader_gets_merged_deltas_and_loses_nothing() -> None:
    answer = Answer("a", [3], 2, 0.0)
    stream = prompt(answer, n=2)
    text = "".join(chr(97 + i % 26) for i in range(5 * MAX_EVENTS))
    for index, char in enumerate(text):
        stream.push(delta(index, char), 1.0)
    stream.push(delta(0, "z", 1, "stop"), 1.0)
    stream.push(delta(len(text), "", 0, "length"), 1.0)
    events = read(answer)
    mine = [event for event in events if event.choice == 0]
    assert len(mine) <= MAX_EVENTS + 1
    assert "".join(event.text for event in mine) == text
    assert [token for event in mine for token in event.token_ids] == [ord(char) for char in text]
    assert mine[-1].finish == "length" and mine[-1].num_tokens == len(text)
    assert [event.text for event in events if event.choice == 1] == ["z"]


def test_merge_keeps_the_head_of_the_first_and_the_end_of_the_last() -> None:
    first = TextDelta("r", 0, 0, 0, (1,), "a", 1, scheduler="s", prompt_tokens=7, cached_tokens=2)
    whole = merge([first, delta(1, "b"), delta(2, "c", 0, "stop")])
    assert (whole.text, whole.first_index, whole.num_tokens, whole.finish) == ("abc", 0, 3, "stop")
    assert (whole.scheduler, whole.prompt_tokens, whole.cached_tokens) == ("s", 7, 2)


def test_merge_joins_logprobs_and_keeps_prompt_logprobs_and_text_offset_of_the_first() -> None:
    def entries(text: str) -> tuple[TokenLogprob, ...]:
        return tuple(TokenLogprob(ord(char), -1.0, ((ord(char), -1.0),)) for char in text)

    def scored(index: int, text: str) -> TextDelta:
        return msgspec.structs.replace(delta(index, text), logprobs=entries(text), text_offset=10 + index)

    first = msgspec.structs.replace(scored(0, "ab"), prompt_logprobs=(TokenLogprob(5, None),))
    whole = merge([merge([first, delta(2)]), scored(2, "c"), scored(3, "d")])
    assert whole.logprobs == entries("abcd")
    assert (whole.prompt_logprobs, whole.text_offset) == ((TokenLogprob(5, None),), 10)


def test_failure_before_any_delta_is_raised_by_first() -> None:
    async def run() -> None:
        answer = Answer("a", [3], 1, 0.0)
        waiting = asyncio.create_task(answer.first())
        await asyncio.sleep(0)
        answer.fail(ServerUnavailable("gone"))
        with pytest.raises(ServerUnavailable):
            await waiting

    asyncio.run(run())


def test_failure_after_output_comes_after_that_output() -> None:
    async def run() -> None:
        answer = Answer("a", [3], 1, 0.0)
        prompt(answer).push(delta(0, "ab"), 1.0)
        answer.fail(ServerUnavailable("gone"))
        await answer.first()
        seen = []
        with pytest.raises(ServerUnavailable):
            async for batch in answer.batches():
                seen += batch
        assert [event.text for event in seen] == ["ab"]

    asyncio.run(run())


def test_silence_gives_empty_batches() -> None:
    async def run() -> None:
        answer = Answer("a", [3], 1, 0.0)
        stream = prompt(answer)
        batches = answer.batches(0.01)
        assert await anext(batches) == [] and await anext(batches) == []
        stream.push(delta(0, "a"), 1.0)
        assert [event.text for event in await anext(batches)] == ["a"]
        await batches.aclose()

    asyncio.run(run())


def test_interval_joins_what_comes_soon_after_the_first() -> None:
    async def run() -> None:
        answer = Answer("a", [3], 1, 0.0, interval_s=0.05)
        stream = prompt(answer)
        batches = answer.batches()
        stream.push(delta(0, "a"), 1.0)
        assert [event.text for event in await anext(batches)] == ["a"]
        for index, char in enumerate("bcd", start=1):
            stream.push(delta(index, char), 1.0)
        assert [event.text for event in await anext(batches)] == ["bcd"]
        await batches.aclose()

    asyncio.run(run())


def test_only_choice_0_says_how_much_of_the_prompt_was_cached() -> None:
    """SGLang #5525: later choices find the prompt that the first has just computed."""
    answer = Answer("a", [32], 2, 0.0)
    stream = prompt(answer, n=2)
    stream.push(TextDelta("r", 0, 1, 0, (1,), "a", 1, cached_tokens=16), 1.0)
    stream.push(TextDelta("r", 0, 0, 0, (1,), "a", 1, cached_tokens=0), 1.0)
    assert answer.cached_tokens == [0]
