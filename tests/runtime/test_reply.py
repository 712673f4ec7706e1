"""`Reply` over scripted deltas: orders that a real run seldom has."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from overlap_serve.config import FakeModel, ServeConfig, fake_facts
from overlap_serve.messages import TextDelta
from overlap_serve.runtime.prepare import Body, Prepared, Preparer
from overlap_serve.runtime.reply import Reply
from overlap_serve.runtime.streams import Answer
from overlap_serve.sampling import FinishReason, TokenLogprob
from overlap_serve.text.template import fake_text

TEXT = fake_text()
CONFIG = ServeConfig(engine="fake", served_model_name="m", fake=FakeModel(max_model_len=64))


async def prepared(**fields: Any) -> Prepared:
    preparer = Preparer(CONFIG, TEXT, fake_facts(CONFIG.fake))
    try:
        body = Body("completion", json.dumps({"prompt": "Hi", "echo": True, "logprobs": 0, **fields}).encode())
        return await preparer.tokenize(await preparer.parse(body), False, 64)
    finally:
        preparer.close()


def delta(
    choice: int,
    text: str,
    num_tokens: int,
    finish: FinishReason | None = None,
    stop_reason: str | None = None,
    prompt: tuple[TokenLogprob, ...] | None = None,
) -> TextDelta:
    return TextDelta(
        rid="r",
        attempt=0,
        choice=choice,
        first_index=num_tokens - len(text),
        token_ids=tuple(text.encode()),
        text=text,
        num_tokens=num_tokens,
        finish=finish,
        stop_reason=stop_reason,
        logprobs=tuple(TokenLogprob(token_id, -1.0) for token_id in text.encode()),
        prompt_logprobs=prompt,
    )


PROMPT = (TokenLogprob(256, None), TokenLogprob(72, -2.0), TokenLogprob(105, -3.0))


def replies(deltas: list[TextDelta], **fields: Any) -> tuple[list[Any], dict[str, Any]]:
    """(events without [DONE], body) of an answer that got these deltas."""

    async def run() -> tuple[list[Any], dict[str, Any]]:
        ready = await prepared(**fields)
        made = []
        for _ in range(2):
            answer = Answer("label", [3], ready.request.n, 0.0)
            for item in deltas:
                answer.push(item, 1.0)
            made.append(Reply(ready, answer, "fp", lambda left: None, TEXT.tokenizer))
        stream = b"".join([data async for data in made[0].events(10.0)]).decode().split("\n\n")
        assert stream[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in stream[:-2]], await made[1].body()

    return asyncio.run(run())


def test_a_choice_that_is_ahead_waits_for_the_values_of_its_prompt() -> None:
    ahead = [delta(1, "x", 1), delta(1, "y", 2, "length")]
    events, body = replies([*ahead, delta(0, "a", 1, prompt=PROMPT), delta(0, "b", 2, "length")], n=2)
    assert [event["choices"][0]["index"] for event in events[:2]] == [0, 0]
    begin = next(event["choices"][0] for event in events if event["choices"][0]["index"] == 1)
    assert (begin["text"], begin["logprobs"]["token_logprobs"]) == ("Hi", [None, -2.0, -3.0])
    assert [choice["text"] for choice in body["choices"]] == ["Hiab", "Hixy"]
    assert body["choices"][1]["logprobs"] == {
        "tokens": ["<|bos|>", "H", "i", "x", "y"],
        "token_logprobs": [None, -2.0, -3.0, -1.0, -1.0],
        "top_logprobs": [None, {"H": -2.0}, {"i": -3.0}, {"x": -1.0}, {"y": -1.0}],
        "text_offset": [0, 0, 1, 2, 3],
    }


def test_a_prompt_that_ends_before_its_values_has_null_for_them() -> None:
    events, body = replies(
        [delta(1, "x", 1), delta(0, "", 0, "abort", "deadline"), delta(1, "", 1, "abort", "deadline")], n=2
    )
    for choice in body["choices"]:
        assert choice["logprobs"]["token_logprobs"][:3] == [None, None, None]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", "deadline")
    assert sorted(event["choices"][0]["text"] for event in events) == ["", "", "Hi", "Hi", "x"]


def test_scoring_hides_the_token_and_even_why_it_ended() -> None:
    events, body = replies([delta(0, "", 0, prompt=PROMPT), delta(0, "a", 1, "stop", "a")], max_tokens=0)
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("Hi", "length", None)
    assert choice["logprobs"]["tokens"] == ["<|bos|>", "H", "i"] and body["usage"]["completion_tokens"] == 0
    assert [event["choices"][0]["text"] for event in events] == ["Hi", ""]


def test_a_scoring_run_that_is_aborted_says_so() -> None:
    _, body = replies([delta(0, "", 0, "abort", "shutdown", PROMPT)], max_tokens=0)
    [choice] = body["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", "shutdown")
