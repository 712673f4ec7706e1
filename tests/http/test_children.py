"""A28: the choices of a prompt and the prompts of a request end each by itself. What ends one leaves the others as they were.

Over HTTP a client names a whole request (its id) or, by a stop string, whichever choice says it. Single choices and prompts are named by
what the server sends to itself: `AbortRequest(rid, cause, choice)`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from overlap_serve.config import FakeModel
from overlap_serve.messages import AbortRequest
from overlap_serve.transport import Outbox
from tests.http.raw import COMPLETIONS, completion_body
from tests.http_rig import KEY, HttpRig

FAKE = FakeModel(base_ms=4.0, max_model_len=4096)
CONFIG = {"max_running_requests": 8}
NUM_TOKENS = 250  # 1 s, for a busy machine to act in
PROMPTS = ["one", "two", "three"]


def post(rig: HttpRig, label: str = "mine", **fields: Any) -> dict[str, Any]:
    with rig.http() as http:
        body = completion_body(max_tokens=NUM_TOKENS, temperature=1, seed=5, **fields)
        response = http.post(COMPLETIONS, json=body, headers={"x-request-id": label})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.fixture(scope="module")
def controls(module_rig: HttpRig) -> dict[str, dict[str, Any]]:
    """Answers of requests that nobody disturbs."""
    return {"3 choices": post(module_rig, n=3), "3 prompts": post(module_rig, prompt=PROMPTS)}


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def ends(answer: dict[str, Any]) -> list[tuple[str, str | None]]:
    return [(choice["finish_reason"], choice["stop_reason"]) for choice in answer["choices"]]


def interrupted(
    rig: HttpRig, when: Callable[[], bool], message: Callable[[], AbortRequest], **fields: Any
) -> dict[str, Any]:
    """The answer of a request into which `message` is sent to the scheduler once `when` holds."""
    outbox = Outbox(KEY, "test")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, rig, **fields)
        rig.until(when, "it is time to abort")
        outbox.send(rig.worker.endpoint, [message()])
        result = answer.result(20)
    outbox.close()
    return result


def check_others(answer: dict[str, Any], control: dict[str, Any], ended: int) -> None:
    """All but choice `ended` are what they are without any abort; that one is a beginning of it, and usage says what there is."""
    want: list[tuple[str, str | None]] = [("length", None)] * len(texts(control))
    want[ended] = ("abort", "client_abort")
    assert ends(answer) == want
    for index, (text, whole) in enumerate(zip(texts(answer), texts(control), strict=True)):
        assert whole.startswith(text) and len(text) < len(whole) if index == ended else text == whole
    assert answer["usage"]["completion_tokens"] == sum(len(text) for text in texts(answer))
    assert answer["usage"]["prompt_tokens"] == control["usage"]["prompt_tokens"]


@pytest.mark.parametrize("choice", [0, 1, 2])
def test_a28_abort_of_one_choice_leaves_the_others_alone(
    rig: HttpRig, choice: int, controls: dict[str, dict[str, Any]]
) -> None:
    control = controls["3 choices"]
    assert len(set(texts(control))) == 3
    aborted = rig.counters()["aborted"]
    answer = interrupted(
        rig,
        lambda: rig.detokenizer.open_streams() == 3,
        lambda: AbortRequest(rig.calls.rids()[0], "api", choice),
        n=3,
    )
    check_others(answer, control, choice)
    assert rig.counters()["aborted"] == aborted + 1, "one request, in which a choice was ended from outside"


@pytest.mark.parametrize("prompt", [0, 1, 2])
def test_a28_abort_of_one_prompt_leaves_the_others_alone(
    rig: HttpRig, prompt: int, controls: dict[str, dict[str, Any]]
) -> None:
    control = controls["3 prompts"]
    answer = interrupted(
        rig,
        lambda: rig.detokenizer.open_streams() == 3,
        lambda: AbortRequest(rig.calls.rids()[prompt], "api"),
        prompt=PROMPTS,
    )
    check_others(answer, control, prompt)


def test_a28_abort_of_a_choice_that_still_waits_leaves_the_others_alone(rig: HttpRig) -> None:
    """12 choices for 8 slots: the last has had nothing yet."""
    control = post(rig, n=12)
    answer = interrupted(
        rig,
        lambda: rig.detokenizer.open_streams() == 8,
        lambda: AbortRequest(rig.calls.rids()[0], "api", 11),
        n=12,
    )
    check_others(answer, control, 11)
    assert texts(answer)[11] == ""


@pytest.mark.parametrize("stream", [False, True])
def test_a28_a_stop_string_ends_only_the_choice_that_says_it(
    rig: HttpRig, stream: bool, controls: dict[str, dict[str, Any]]
) -> None:
    control = texts(controls["3 choices"])
    stop = control[1][8:12]
    assert [text.find(stop) for text in control] == [-1, 8, -1]
    if stream:
        assert streamed(rig, n=3, stop=stop) == [control[0], control[1][:8], control[2]]
    else:
        answer = post(rig, n=3, stop=stop)
        assert texts(answer) == [control[0], control[1][:8], control[2]]
        assert ends(answer) == [("length", None), ("stop", stop), ("length", None)]


def streamed(rig: HttpRig, **fields: Any) -> list[str]:
    """Joined text of each choice."""
    joined: dict[int, str] = {}
    with rig.openai() as client:
        fields = {"max_tokens": NUM_TOKENS, "temperature": 1, "seed": 5, **fields}
        for chunk in client.completions.create(model="fake", prompt="hello", stream=True, **fields):
            for choice in chunk.choices:
                joined[choice.index] = joined.get(choice.index, "") + choice.text
    return [joined[index] for index in sorted(joined)]


def test_a28_abort_by_id_ends_all_children_of_that_request_and_no_others(
    rig: HttpRig, controls: dict[str, dict[str, Any]]
) -> None:
    control = controls["3 prompts"]
    with ThreadPoolExecutor(2) as pool:
        mine = pool.submit(post, rig, "mine", prompt=PROMPTS[:2], n=2)
        theirs = pool.submit(post, rig, "theirs", prompt=PROMPTS, n=1)
        rig.until(lambda: rig.detokenizer.open_streams() == 7, "all stream")
        with httpx.Client(base_url=rig.url, verify=False) as http:
            assert http.post("/v1/abort", json={"request_id": "mine"}).json() == {"aborted": 1}
        assert ends(mine.result(20)) == [("abort", "client_abort")] * 4
        assert texts(theirs.result(20)) == texts(control)
        assert ends(theirs.result()) == [("length", None)] * 3
