"""The official client against the whole path: what users of the API see when all goes well."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from overlap_serve.config import FakeModel
from tests.http_rig import MODEL, HttpRig

FAKE = FakeModel(base_ms=1.0, max_model_len=1024, eos_every=40)
MESSAGES: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the capital of France?"},
]


@pytest.fixture
def client(rig: HttpRig) -> Iterator[openai.OpenAI]:
    with rig.openai() as client:
        yield client


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, "temperature": 0, **fields})


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    return client.completions.create(**{"model": MODEL, "prompt": "Once upon", "temperature": 0, **fields})


def joined(chunks: Any) -> tuple[dict[int, str], dict[int, tuple[Any, Any]], Any]:
    """(text, (finish_reason, stop_reason), usage) of a chat or text stream, by choice."""
    texts: dict[int, str] = {}
    ends: dict[int, tuple[Any, Any]] = {}
    usage = None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert choice.index not in ends, "a chunk after the end of its choice"
            text = choice.delta.content if chunk.object == "chat.completion.chunk" else choice.text
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
            if choice.finish_reason is not None:
                ends[choice.index] = (choice.finish_reason, choice.stop_reason)
    return texts, ends, usage


def test_a3_stream_false_gives_json_with_finish_reason_and_usage(client: openai.OpenAI) -> None:
    answer = chat(client, max_tokens=5, extra_body={"ignore_eos": True, "return_token_ids": True})
    assert answer.object == "chat.completion"
    assert answer.choices[0].finish_reason == "length"
    assert len(answer.choices[0].token_ids) == answer.usage.completion_tokens == 5
    assert len(answer.choices[0].message.content) == 5
    assert answer.usage.prompt_tokens == len(answer.prompt_token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5


def test_a3_finish_reason_is_stop_when_the_model_ends(client: openai.OpenAI) -> None:
    answer = chat(client, max_tokens=900)
    assert (answer.choices[0].finish_reason, answer.choices[0].stop_reason) == ("stop", None)
    # The end token is counted, and adds no text.
    assert answer.usage.completion_tokens == len(answer.choices[0].message.content) + 1


def test_prompt_begins_with_exactly_one_bos(client: openai.OpenAI) -> None:
    answer = chat(client, max_tokens=1, extra_body={"return_token_ids": True})
    assert answer.prompt_token_ids[0] == 256 and answer.prompt_token_ids.count(256) == 1


@pytest.mark.parametrize("send", [chat, complete])
@pytest.mark.parametrize(
    "fields", [{}, {"n": 3, "temperature": 1.0, "seed": 7}, {"stop": ["a", "\u00e9"]}, {"max_tokens": 1}]
)
def test_joined_stream_equals_the_answer_that_is_not_streamed(
    client: openai.OpenAI, send: Any, fields: dict[str, Any]
) -> None:
    fields = {"max_tokens": 60, **fields}
    whole = send(client, **fields)
    texts, ends, usage = joined(send(client, stream=True, stream_options={"include_usage": True}, **fields))
    assert sorted(texts) == [choice.index for choice in whole.choices]
    for choice in whole.choices:
        assert texts[choice.index] == (choice.message.content if send is chat else choice.text)
        assert ends[choice.index] == (choice.finish_reason, choice.stop_reason)
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_join_rule_holds_for_many_random_requests_at_once(client: openai.OpenAI) -> None:
    def check(seed: int) -> None:
        fields: dict[str, Any] = {
            "n": 1 + seed % 4,
            "temperature": 0.8,
            "seed": seed,
            "max_tokens": 5 + seed % 37,
            "messages": [{"role": "user", "content": f"{seed} h\u00e9llo \u4e16\u754c " * (1 + seed % 9)}],
            "stop": [[], ["x"], ["ab", "b"], ["\n"]][seed % 4] or None,
        }
        whole = chat(client, **fields)
        texts, ends, _ = joined(chat(client, stream=True, **fields))
        assert [texts[c.index] for c in whole.choices] == [c.message.content for c in whole.choices]
        assert [ends[c.index][0] for c in whole.choices] == [c.finish_reason for c in whole.choices]

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(check, range(60)))


def test_stop_string_ends_the_choice_and_its_tokens_are_counted_at_the_cut(client: openai.OpenAI) -> None:
    free = chat(client, max_tokens=30, extra_body={"ignore_eos": True})
    text = free.choices[0].message.content
    stop = text[10:12]
    cut = text.index(stop)
    answer = chat(client, max_tokens=30, stop=[stop], extra_body={"ignore_eos": True})
    assert answer.choices[0].message.content == text[:cut]
    assert (answer.choices[0].finish_reason, answer.choices[0].stop_reason) == ("stop", stop)
    assert answer.usage.completion_tokens == cut + 2


def test_a28_every_choice_of_n_has_its_own_end_and_the_prompt_counts_once(client: openai.OpenAI) -> None:
    answer = chat(client, n=8, temperature=1.0, seed=3, max_tokens=200, extra_body={"return_token_ids": True})
    lengths = [len(choice.token_ids) for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == list(range(8))
    assert len(set(lengths)) > 4, "the choices differ"
    assert answer.usage.completion_tokens == sum(lengths)
    assert answer.usage.prompt_tokens == len(answer.prompt_token_ids)
    assert answer.usage.prompt_tokens_details.cached_tokens <= answer.usage.prompt_tokens
    texts, ends, usage = joined(
        chat(client, n=8, temperature=1.0, seed=3, max_tokens=200, stream=True, stream_options={"include_usage": True})
    )
    assert [texts[index] for index in range(8)] == [choice.message.content for choice in answer.choices]
    assert len(ends) == 8 and usage.completion_tokens == sum(lengths)


def test_several_prompts_give_choices_in_the_order_of_prompts(client: openai.OpenAI) -> None:
    prompts: list[str] = ["one", "two", "three"]
    alone = [complete(client, prompt=prompt, n=2, temperature=1.0, seed=5, max_tokens=8) for prompt in prompts]
    together = complete(client, prompt=prompts, n=2, temperature=1.0, seed=5, max_tokens=8)
    assert [c.index for c in together.choices] == list(range(6))
    assert [c.text for c in together.choices] == [c.text for answer in alone for c in answer.choices]
    assert together.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone)
    texts, _, _ = joined(complete(client, prompt=prompts, n=2, temperature=1.0, seed=5, max_tokens=8, stream=True))
    assert [texts[index] for index in range(6)] == [c.text for c in together.choices]


def test_continuous_usage_never_falls_and_ends_at_the_totals(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(chat(client, n=2, temperature=1.0, seed=1, max_tokens=20, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    whole = chat(client, n=2, temperature=1.0, seed=1, max_tokens=20)
    assert counts[-1] == whole.usage.completion_tokens


def test_streaming_helper_of_the_client_accepts_the_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=300) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == chat(client, max_tokens=300).choices[0].message.content


def test_same_seed_gives_the_same_text_in_a_busy_batch(client: openai.OpenAI) -> None:
    alone = chat(client, temperature=1.0, seed=11, max_tokens=30).choices[0].message.content
    with ThreadPoolExecutor(12) as pool:
        no_end = {"ignore_eos": True}  # two that end at once would be equal
        others = [pool.submit(chat, client, temperature=1.0, max_tokens=30, extra_body=no_end) for _ in range(10)]
        again = pool.submit(chat, client, temperature=1.0, seed=11, max_tokens=30)
        assert again.result().choices[0].message.content == alone
        assert len({other.result().choices[0].message.content for other in others}) == 10, "seeds are drawn"


def test_models_are_listed_with_a_fixed_time_and_found_by_name(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, model.owned_by) == (MODEL, "overlap_serve")
    assert client.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


def test_client_sees_the_request_id_of_answers_and_errors(client: openai.OpenAI) -> None:
    headers = {"X-Request-Id": "my.id:1"}
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, max_tokens=1, extra_headers=headers
    )
    assert raw.request_id == "my.id:1"
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, temperature=9, extra_headers=headers)
    assert caught.value.request_id == "my.id:1"
    assert (caught.value.code, caught.value.param) == ("decimal_above_max_value", "temperature")


def test_a6_one_request_id_for_50_requests_at_once_is_only_a_label(client: openai.OpenAI) -> None:
    def send(seed: int) -> str:
        answer = chat(
            client, temperature=1.0, seed=seed % 5, max_tokens=20, extra_headers={"X-Request-Id": "same-for-all"}
        )
        return str(answer.choices[0].message.content)

    alone = [send(seed) for seed in range(5)]
    with ThreadPoolExecutor(50) as pool:
        assert list(pool.map(send, range(50))) == alone * 10
