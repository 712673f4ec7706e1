"""http-api section 11: /tokenize and /detokenize give the ids of the generate routes, and hold up nobody."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from overlap_serve.config import FakeModel
from overlap_serve.messages import ReplicaStatus
from tests.http.raw import CHAT, COMPLETIONS, chat_body, completion_body
from tests.http_rig import MODEL, HttpRig

FAKE = FakeModel(base_ms=1.0, max_model_len=1024)
CONFIG = {"trust_request_chat_template": True}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "h\u00e9 "}, {"type": "text", "text": "<|eos|> \u4e16"}]},
    {"role": "assistant", "content": "I think "},
]


def ids_of(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"add_special_tokens": True},
        {"chat_template_kwargs": {"bos_token": "X"}},
        {
            "chat_template": "{{ messages[0].content }}{% if think %}!{% endif %}",
            "chat_template_kwargs": {"think": True},
        },
        {"reasoning_effort": "low", "documents": [{"text": "d"}]},
    ],
)
def test_messages_have_the_ids_that_a_chat_generates_from(rig: HttpRig, options: dict[str, Any]) -> None:
    with rig.http() as http:
        generated = ids_of(http, CHAT, chat_body(messages=CONVERSATION, max_tokens=1, return_token_ids=True, **options))
        for path in ("/tokenize", "/v1/tokenize"):
            answer = ids_of(http, path, {"model": MODEL, "messages": CONVERSATION, **options})
            assert answer["tokens"] == generated["prompt_token_ids"]
            assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 1024)
            assert answer["token_strs"] is None


@pytest.mark.parametrize("options", [{}, {"add_special_tokens": False}])
def test_prompts_have_the_ids_that_a_completion_generates_from(rig: HttpRig, options: dict[str, Any]) -> None:
    prompts = ["h\u00e9llo", "<|bos|>x"]
    with rig.http() as http:
        body = completion_body(prompt=prompts, max_tokens=1, return_token_ids=True, **options)
        generated = [choice["prompt_token_ids"] for choice in ids_of(http, COMPLETIONS, body)["choices"]]
        many = ids_of(http, "/tokenize", {"prompt": prompts, "return_token_strs": True, **options})
        assert many["tokens"] == generated and many["count"] == [len(ids) for ids in generated]
        assert [len(strings) for strings in many["token_strs"]] == many["count"]
        one = ids_of(http, "/tokenize", {"prompt": prompts[0], "return_token_strs": True, **options})
        assert (one["tokens"], one["count"]) == (generated[0], len(generated[0]))
        assert one["token_strs"][-3:] == ["l", "l", "o"] and "\ufffd" in one["token_strs"]


def test_continue_final_message_goes_on_inside_of_the_last_message(rig: HttpRig) -> None:
    with rig.http() as http:
        ids = ids_of(http, "/tokenize", {"messages": CONVERSATION, "continue_final_message": True})["tokens"]
        text = ids_of(http, "/detokenize", {"tokens": ids})["text"]
        opened = ids_of(
            http, "/detokenize", {"tokens": ids_of(http, "/tokenize", {"messages": CONVERSATION})["tokens"]}
        )
    assert text.endswith("<|assistant|>\nI think ") and opened["text"].endswith("I think \n<|assistant|>\n")


def test_detokenize_answers_under_both_names(rig: HttpRig) -> None:
    with rig.http() as http:
        for path in ("/detokenize", "/v1/detokenize"):
            assert ids_of(http, path, {"tokens": [256, 72, 105]}) == {"prompt": "<|bos|>Hi", "text": "<|bos|>Hi"}
        skipped = ids_of(http, "/detokenize", {"tokens": [256, 72, 105], "skip_special_tokens": True})
        assert skipped["text"] == "Hi"
        assert ids_of(http, "/detokenize", {"tokens": []}) == {"prompt": "", "text": ""}
        assert ids_of(http, "/detokenize", {"tokens": [[72], [], list("\u00e9".encode())]})["text"] == [
            "H",
            "",
            "\u00e9",
        ]
        empty = ids_of(http, "/tokenize", {"prompt": "", "add_special_tokens": False})
        assert (empty["tokens"], empty["count"]) == ([], 0)


@pytest.mark.parametrize("tokens", [[-1], [258], [[65], [2**63]]])
def test_a24_detokenize_refuses_ids_that_do_not_exist(rig: HttpRig, tokens: Any) -> None:
    with rig.http() as http:
        response = http.post("/detokenize", json={"tokens": tokens})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_token_id")


def test_a27_template_errors_are_400_on_tokenize_too(rig: HttpRig) -> None:
    body = {"messages": CONVERSATION, "chat_template": "{{ raise_exception('no') }}"}
    with rig.http() as http:
        response = http.post("/tokenize", json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "chat_template_error")


def test_both_work_while_no_engine_is_ready_and_report_ignored_fields(rig: HttpRig) -> None:
    rig.cluster.statuses = [ReplicaStatus("s", "loading")]
    try:
        with rig.http() as http:
            response = http.post("/tokenize", json={"messages": CONVERSATION, "temperature": 1, "zzz": 1})
            assert response.status_code == 200
            assert response.headers["x-ignored-fields"] == "temperature,zzz"
            assert http.post("/detokenize", json={"tokens": [65]}).status_code == 200
    finally:
        rig.cluster.statuses = None


def test_a31_megabytes_to_tokenize_do_not_hold_up_health(rig: HttpRig) -> None:
    """On the event loop, or with the GIL held, somebody who asks for health waits as long as a whole call takes. Both are measured in
    the same run, so that a busy machine slows both."""
    text = "a long text \u4e16 " * 50_000
    waits: list[float] = []
    with rig.http() as http, ThreadPoolExecutor(2) as pool:
        sent = [pool.submit(seconds_of_post, rig, "/tokenize", {"prompt": text}) for _ in range(3)]
        while not all(future.done() for future in sent):
            begin = time.perf_counter()
            assert http.get("/health").status_code == 200
            waits.append(time.perf_counter() - begin)
    quickest = min(future.result() for future in sent)
    assert len(waits) > 8 and max(waits) < 0.5 * quickest, (len(waits), max(waits), quickest)


def seconds_of_post(rig: HttpRig, path: str, body: dict[str, Any]) -> float:
    """Until the answer begins; encoding the body and decoding the answer, both in this process, are not the server's."""
    content = json.dumps(body).encode()
    with rig.http() as http:
        begin = time.perf_counter()
        with http.stream("POST", path, content=content, headers={"content-type": "application/json"}) as answer:
            assert answer.status_code == 200
            return time.perf_counter() - begin
