"""A6 over HTTP: a request id is a label. It may be used again while the scheduler still runs the request that had it before."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from overlap_serve.config import FakeModel
from tests.http.raw import COMPLETIONS, RawPost, completion_body
from tests.http_rig import HttpRig

FAKE = FakeModel(base_ms=2.0, max_model_len=4096)
CONFIG = {"max_running_requests": 8}
NUM_TOKENS = 24
ROUNDS = 15


def text_of(http: httpx.Client, prompt: str, label: str | None = None, **fields: Any) -> str:
    """A whole answer, with the checks that each must pass."""
    headers = {} if label is None else {"x-request-id": label}
    body = completion_body(prompt=prompt, max_tokens=NUM_TOKENS, **fields)
    response = http.post(COMPLETIONS, json=body, headers=headers)
    assert response.status_code == 200, response.text
    assert label is None or response.headers["x-request-id"] == label
    [choice] = response.json()["choices"]
    assert choice["finish_reason"] == "length"
    assert response.json()["usage"]["completion_tokens"] == NUM_TOKENS
    return str(choice["text"])


def read_to_finish(post: RawPost) -> None:
    """Up to the chunk that says how it ended; [DONE] may still be on its way."""
    for count in itertools.count(1):
        post.read_events(count)
        if b'"finish_reason":"' in post.received:
            return
        assert b"[DONE]" not in post.received


@pytest.mark.parametrize("ends_by", ["length", "stop"])
def test_a6_an_id_may_be_used_again_at_the_moment_of_its_finish(rig: HttpRig, ends_by: str) -> None:
    """A stop string ends a choice before the scheduler knows of it: the old request is still in a step when its id returns."""
    with rig.http() as http:
        first, second = text_of(http, "first"), text_of(http, "second")
        fields: dict[str, Any] = {"stop": first[3:7], "max_tokens": 3000} if ends_by == "stop" else {"max_tokens": 5}
        for _ in range(ROUNDS):
            body = completion_body(prompt="first", stream=True, **fields)
            with RawPost(rig, COMPLETIONS, body, x_request_id="again") as post:
                read_to_finish(post)
                assert text_of(http, "second", "again") == second
                post.read_events(1000)
            assert post.received.count(b"data: [DONE]") == 1
            assert f'"finish_reason":"{ends_by}"'.encode() in post.received


def test_a6_chains_of_requests_with_one_id_do_not_disturb_each_other(rig: HttpRig) -> None:
    """Eight clients, all with the same id, each with its next request as soon as the last has ended."""
    with rig.http() as http:
        right = {str(i): text_of(http, str(i)) for i in range(8)}

    def chain(prompt: str) -> list[str]:
        with rig.http() as http:
            return [text_of(http, prompt, "shared") for _ in range(10)]

    with ThreadPoolExecutor(8) as pool:
        chains = dict(zip(right, pool.map(chain, right), strict=True))
    assert chains == {prompt: [text] * 10 for prompt, text in right.items()}


def test_a6_abort_by_id_names_who_has_the_id_now(rig: HttpRig) -> None:
    """Not who had it a moment ago, and not nobody because that one has ended."""
    with rig.http() as http:
        first = text_of(http, "first")
        body = completion_body(prompt="first", stream=True, stop=first[3:7], max_tokens=3000)
        with RawPost(rig, COMPLETIONS, body, x_request_id="mine") as old:
            read_to_finish(old)
            assert http.post("/v1/abort", json={"request_id": "mine"}).json() == {"aborted": 0}
            with RawPost(rig, COMPLETIONS, completion_body(stream=True, max_tokens=3000), x_request_id="mine") as new:
                new.read_events(2)
                assert http.post("/v1/abort", json={"request_id": "mine"}).json() == {"aborted": 1}
                new.read_events(10_000)
            old.read_events(10_000)
    assert b'"finish_reason":"abort","stop_reason":"client_abort"' in new.received
    assert b'"finish_reason":"stop"' in old.received and b"abort" not in old.received
