"""http-api section 7 over the whole path: logprobs, echo, prompt_logprobs; streamed and not, cold and warm."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import httpx
import openai
import pytest

from overlap_serve.config import FakeModel
from tests.http.raw import CHAT, COMPLETIONS, chat_body, completion_body
from tests.http_rig import HttpRig, http_rig

FAKE = FakeModel(base_ms=1.0, max_model_len=1024, eos_every=40)
BOS = 256
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@pytest.fixture
def client(rig: HttpRig) -> Iterator[openai.OpenAI]:
    with rig.openai() as client:
        yield client


@pytest.fixture
def http(rig: HttpRig) -> Iterator[httpx.Client]:
    with rig.http() as http:
        yield http


def strict(text: str) -> Any:
    """As strict clients read JSON: no NaN, no Infinity, no key twice."""

    def constant(name: str) -> NoReturn:
        raise AssertionError(f"{name} is not JSON")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({name for name, _ in items}) == len(items), "a key twice"
        return dict(items)

    return json.loads(text, parse_constant=constant, object_pairs_hook=pairs)


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return strict(response.text)


def stream(http: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    text = http.post(path, json={**body, "stream": True}).text
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return [strict(event) for event in events[:-1]]


def joined(events: list[Any]) -> dict[int, dict[str, Any]]:
    """What a client that joins all chunks has of each choice, in the shape of a choice that is not streamed."""
    whole: dict[int, dict[str, Any]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        mine = whole.setdefault(choice["index"], {"text": "", "token_ids": [], "logprobs": None, "finish_reason": None})
        assert mine["finish_reason"] is None, "a chunk after the end of its choice"
        mine["text"] += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        mine["token_ids"] += choice.get("token_ids", [])
        for name, values in (choice["logprobs"] or {}).items():
            if mine["logprobs"] is None:
                mine["logprobs"] = {}
            mine["logprobs"][name] = None if values is None else mine["logprobs"].get(name, []) + values
        mine["finish_reason"] = choice["finish_reason"]
        mine["stop_reason"] = choice.get("stop_reason")
    return whole


def flat(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice that is not streamed, in the shape of `joined`."""
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    # Of a choice without a token nothing is streamed: its joined lists are empty, too.
    logprobs = choice["logprobs"] if any((choice["logprobs"] or {}).values()) else None
    shared = {"logprobs": logprobs, "finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"]}
    return {"text": text, "token_ids": choice.get("token_ids", []), **shared}


def test_chat_logprobs_reach_the_official_client(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    answer = client.chat.completions.create(
        model="fake", messages=messages, temperature=0, max_tokens=12, logprobs=True, top_logprobs=3
    )
    [choice] = answer.choices
    assert choice.logprobs is not None and choice.logprobs.content is not None and answer.usage is not None
    entries = choice.logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    assert bytes(byte for entry in entries for byte in entry.bytes or []).decode() == choice.message.content
    for entry in entries:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        # Greedy: the token itself is the likeliest.
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, values[0])


def test_streaming_helper_of_the_client_gathers_the_logprobs(client: openai.OpenAI) -> None:
    options: Any = {
        "model": "fake",
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": 0,
        "max_tokens": 40,
        "logprobs": True,
        "top_logprobs": 2,
    }
    with client.chat.completions.stream(**options) as events:
        final = events.get_final_completion()
    whole = client.chat.completions.create(**options)
    assert final.choices[0].logprobs is not None and whole.choices[0].logprobs is not None
    assert final.choices[0].logprobs.content == whole.choices[0].logprobs.content


def test_logprobs_are_null_unless_asked_for(http: httpx.Client) -> None:
    for path, body in ((CHAT, chat_body(max_tokens=3)), (COMPLETIONS, completion_body(max_tokens=3, echo=True))):
        assert post(http, path, body)["choices"][0]["logprobs"] is None
        assert all(event["choices"][0]["logprobs"] is None for event in stream(http, path, body))
    empty = post(http, CHAT, chat_body(max_tokens=3, logprobs=True))["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in empty] == [[]] * 3


def test_completion_logprobs_with_echo_cover_the_prompt_and_the_answer(http: httpx.Client) -> None:
    prompt = "Ein h\u00e9 \u4e16!"
    body = completion_body(prompt=prompt, max_tokens=4, logprobs=2, echo=True, return_token_ids=True, ignore_eos=True)
    answer = post(http, COMPLETIONS, body)
    [choice] = answer["choices"]
    lists = choice["logprobs"]
    assert choice["text"].startswith(prompt) and len(choice["text"]) == len(prompt) + 4
    num_prompt = 1 + len(prompt.encode())
    assert answer["usage"]["prompt_tokens"] == num_prompt and answer["usage"]["completion_tokens"] == 4
    assert {len(lists[name]) for name in LISTS} == {num_prompt + 4}
    assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
    assert all(-9999.0 <= value <= 0.0 for value in lists["token_logprobs"][1:])
    assert all(2 <= len(top) <= 3 for top in lists["top_logprobs"][1:])
    assert lists["tokens"][0] == "<|bos|>" and lists["text_offset"][:2] == [0, 0]
    assert lists["text_offset"][-4:] == [len(prompt) + i for i in range(4)]
    for token, offset in zip(lists["tokens"][1:], lists["text_offset"][1:], strict=True):
        assert "\ufffd" in token or choice["text"][offset] == token


def test_echo_of_ids_is_the_decoded_prompt(http: httpx.Client) -> None:
    for stream_ in (False, True):
        body = completion_body(prompt=[[BOS, 72, 105], [72, 111]], n=2, max_tokens=2, echo=True, ignore_eos=True)
        if stream_:
            events = stream(http, COMPLETIONS, body)
            firsts = {e["choices"][0]["index"]: e["choices"][0]["text"] for e in reversed(events)}
            assert firsts == {0: "Hi", 1: "Hi", 2: "Ho", 3: "Ho"}
        else:
            texts = [choice["text"] for choice in post(http, COMPLETIONS, body)["choices"]]
            assert [text[:2] for text in texts] == ["Hi", "Hi", "Ho", "Ho"] and {len(text) for text in texts} == {4}


def test_echo_of_a_truncated_prompt_is_what_was_kept(http: httpx.Client) -> None:
    body = completion_body(
        prompt="abcdef", truncate_prompt_tokens=2, echo=True, logprobs=0, max_tokens=1, ignore_eos=True
    )
    [choice] = post(http, COMPLETIONS, body)["choices"]
    assert choice["text"][:-1] == "ef" and choice["logprobs"]["text_offset"] == [0, 1, 2]


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_scoring_returns_the_prompt_and_hides_the_token_that_was_made(http: httpx.Client, limit: str) -> None:
    body = completion_body(prompt="Hello", echo=True, logprobs=1, n=2, return_token_ids=True, **{limit: 0})
    answer = post(http, COMPLETIONS, body)
    for choice in answer["choices"]:
        assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("Hello", "length", [])
        assert choice["logprobs"]["tokens"] == ["<|bos|>", *"Hello"]
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] == 6
    longer = post(http, COMPLETIONS, completion_body(prompt="Hello", echo=True, logprobs=1, max_tokens=5))
    for name in LISTS:
        assert longer["choices"][0]["logprobs"][name][:6] == answer["choices"][0]["logprobs"][name]
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    events = stream(http, COMPLETIONS, {**body, **options})
    assert joined(events) == {i: flat(choice) for i, choice in enumerate(answer["choices"])}
    assert all(event["usage"]["completion_tokens"] == 0 for event in events)


def test_prompt_logprobs_have_the_shape_of_vllm(http: httpx.Client) -> None:
    chat = post(http, CHAT, chat_body(max_tokens=2, prompt_logprobs=2, return_token_ids=True))
    completion = post(http, COMPLETIONS, completion_body(prompt=["Hi", "Ho!"], n=2, max_tokens=2, prompt_logprobs=0))
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"] and chat["choices"][0]["logprobs"] is None
    assert [len(choice["prompt_logprobs"]) for choice in completion["choices"]] == [3, 3, 4, 4]
    for prompt in (chat["prompt_logprobs"], *(choice["prompt_logprobs"] for choice in completion["choices"])):
        assert prompt[0] is None and all(prompt[1:])
    for token_id, candidates in zip(chat["prompt_token_ids"][1:], chat["prompt_logprobs"][1:], strict=True):
        assert 2 <= len(candidates) <= 3
        assert set(candidates[str(token_id)]) == {"logprob", "rank", "decoded_token"}
        assert [item["rank"] for item in list(candidates.values())[:2]] == [1, 2]
    assert all(len(entry) == 1 for entry in completion["choices"][0]["prompt_logprobs"][1:])


def test_a22_prompt_logprobs_are_the_same_with_a_cold_and_a_warm_cache(http: httpx.Client) -> None:
    prompt = "the same prompt again and again, " * 9
    body = completion_body(prompt=prompt, echo=True, logprobs=3, max_tokens=3, ignore_eos=True)
    cold = post(http, COMPLETIONS, body)
    for other in (prompt[: len(prompt) // 2] + "other", prompt, prompt + "longer"):
        post(http, COMPLETIONS, completion_body(prompt=other, max_tokens=20))
    warm = post(http, COMPLETIONS, body)
    assert warm["choices"] == cold["choices"] and warm["usage"] == cold["usage"]
    [alone] = post(http, COMPLETIONS, completion_body(prompt=prompt, prompt_logprobs=3))["choices"]
    byte_values = [
        entry[str(ord(char))]["logprob"] for entry, char in zip(alone["prompt_logprobs"][1:], prompt, strict=True)
    ]
    assert byte_values == cold["choices"][0]["logprobs"]["token_logprobs"][1 : 1 + len(prompt)]


def test_a21_echo_with_logprobs_and_top_k_one_is_strict_json(http: httpx.Client) -> None:
    body = completion_body(prompt="abc", echo=True, logprobs=20, top_k=1, temperature=1.0, max_tokens=8)
    for answer in (post(http, COMPLETIONS, body), *stream(http, COMPLETIONS, body)):
        for choice in answer["choices"]:
            for value in (choice["logprobs"] or {}).get("token_logprobs", []):
                assert value is None or (math.isfinite(value) and value >= -9999.0)


def test_a_held_back_stop_prefix_holds_its_logprobs_too(http: httpx.Client) -> None:
    body = completion_body(max_tokens=40, logprobs=1, ignore_eos=True)
    text = post(http, COMPLETIONS, body)["choices"][0]["text"]
    stopped = {**body, "stop": [text[10:14]]}
    whole = post(http, COMPLETIONS, stopped)["choices"][0]
    at = text.index(text[10:14])
    assert whole["text"] == text[:at] and len(whole["logprobs"]["tokens"]) == at
    events = stream(http, COMPLETIONS, stopped)
    assert joined(events)[0] == flat(whole)
    for choice in (event["choices"][0] for event in events[:-1]):
        assert len(choice["logprobs"]["tokens"]) == len(choice["text"])


PIECES = ["a", "b ", "\n", "\u00e9", "\u4e16\u754c", "\U0001f600", "\u05e9\u05dc", "e\u0301", "Hello ", "x" * 40]


def random_request(number: int) -> tuple[str, dict[str, Any]]:
    choose = random.Random(number)
    text = "".join(choose.choices(PIECES, k=choose.randint(1, 12)))
    fields: dict[str, Any] = {
        "n": choose.randint(1, 4),
        "temperature": choose.choice([0, 0.8, 1.5]),
        "seed": number,
        "max_tokens": choose.randint(1, 40),
        "stop": choose.choice([None, "x", ["ab", "b"], ["\n", "\u00e9"], [chr(c) for c in range(40, 50)]]),
        "include_stop_str_in_output": choose.random() < 0.3,
        "return_token_ids": choose.random() < 0.5,
        "skip_special_tokens": choose.random() < 0.7,
    }
    if choose.random() < 0.5:
        logprobs: dict[str, Any] = choose.choice(
            [{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": choose.randint(0, 5)}]
        )
        return CHAT, {**chat_body(messages=[{"role": "user", "content": text}]), **fields, **logprobs}
    prompt = choose.choice([text, [text, "second " + text], list(text.encode())])
    more: dict[str, Any] = choose.choice([{}, {"logprobs": choose.randint(0, 5)}])
    return COMPLETIONS, {**completion_body(prompt=prompt, echo=choose.random() < 0.4), **fields, **more}


def test_join_rule_holds_for_200_random_requests_under_load(rig: HttpRig) -> None:
    options = {"stream_options": {"include_usage": True}}
    with rig.http() as http:

        def check(number: int) -> None:
            path, body = random_request(number)
            whole = post(http, path, body)
            events = stream(http, path, {**body, **options})
            assert joined(events) == {i: flat(choice) for i, choice in enumerate(whole["choices"])}, (path, body)
            names = ("prompt_tokens", "completion_tokens", "total_tokens")
            assert [events[-1]["usage"][name] for name in names] == [whole["usage"][name] for name in names]

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(check, range(200)))


def test_other_choices_wait_for_the_prompts_values_without_a_prefix_cache() -> None:
    fake = FakeModel(base_ms=1.0, max_model_len=256)
    with http_rig(fake, prefix_cache="none", max_step_tokens=96) as rig, rig.http() as http:
        body = completion_body(prompt=["p" * 200, "q" * 150], n=3, echo=True, logprobs=1, max_tokens=3)
        whole = post(http, COMPLETIONS, body)
        assert joined(stream(http, COMPLETIONS, body)) == {i: flat(choice) for i, choice in enumerate(whole["choices"])}
        assert all(None not in choice["logprobs"]["token_logprobs"][1:] for choice in whole["choices"])
