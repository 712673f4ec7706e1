"""Loads against a small server in this process: counts, order, lengths, kinds of errors."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from typing import TypeVar

import pytest

from overlap_serve.bench.api import Api
from overlap_serve.bench.client import Client, Reply
from overlap_serve.bench.load import Load, Outcome, run_load
from overlap_serve.bench.stats import summarize
from overlap_serve.bench.workload import RandomShape, Session, Turn, arrivals, random_sessions
from tests.bench.sse_server import (
    END,
    HEAD,
    Answer,
    Asked,
    SseServer,
    chunk,
    event,
    prompt_tokens,
    sse_server,
    streamed,
    tokens,
    whole,
)

T = TypeVar("T")


def with_server(
    answer: Callable[[Asked], Answer], use: Callable[[SseServer, Client], Awaitable[T]], timeout_s: float = 30.0
) -> tuple[T, SseServer]:
    async def main() -> tuple[T, SseServer]:
        async with sse_server(answer) as server:
            with closing(Client(server.url, {"Authorization": "Bearer k"}, timeout_s)) as client:
                return await use(server, client), server

    return asyncio.run(main())


def load(
    sessions: Sequence[Session],
    load: Load,
    api: Api | None = None,
    answer: Callable[[Asked], Answer] = streamed,
    timeout_s: float = 30.0,
) -> tuple[Outcome, SseServer]:
    async def use(server: SseServer, client: Client) -> Outcome:
        return await run_load(client, api or Api("m"), sessions, load, 1)

    return with_server(answer, use, timeout_s)


def post(answer: Callable[[Asked], Answer], timeout_s: float = 30.0) -> Reply:
    async def use(server: SseServer, client: Client) -> Reply:
        return await client.post("/completions", b'{"max_tokens": 2, "prompt": [1]}')

    return with_server(answer, use, timeout_s)[0]


def test_a_closed_load_keeps_its_concurrency_and_loses_nothing() -> None:
    sessions = random_sessions(RandomShape(input_len=12, output_len=5), 40, 1)
    outcome, server = load(sessions, Load(concurrency=4))
    made = summarize(outcome.records, outcome.duration_s, {})
    assert (made.ok, made.errors, made.input_tokens, made.output_tokens) == (40, {}, 480, 200)
    assert server.open_peak <= 4
    assert made.peak_concurrency == 4
    assert server.connections == 4  # kept open between requests
    asked = {str(body["prompt"]) for body in server.bodies}
    assert asked == {str(list(session.turns[0].ids)) for session in sessions}
    assert made.itl_ms.count == 40 * 4
    assert made.send_late_ms.max < 1000


def test_an_infinite_rate_sends_all_at_once() -> None:
    outcome, server = load(random_sessions(RandomShape(input_len=3, output_len=2), 12, 1), Load())
    assert (len(outcome.records), server.connections) == (12, 12)
    assert all(record.ok for record in outcome.records)


def test_an_open_load_sends_each_session_at_its_time() -> None:
    """The length of a prompt tells which it is."""
    sessions = [Session((Turn(ids=tuple(range(index + 1)), output_tokens=1),)) for index in range(30)]
    outcome, _ = load(sessions, Load(rate=1000.0, burstiness=2.0))
    due = [record.due_s for record in sorted(outcome.records, key=lambda record: record.input_tokens)]
    wanted = arrivals(1000.0, 2.0, 30, seed=1)
    assert [time - due[0] for time in due] == pytest.approx([time - wanted[0] for time in wanted], abs=1e-6)
    assert all(record.start_s >= record.due_s for record in outcome.records)
    assert outcome.duration_s >= 30 / 1000


def test_a_trace_keeps_its_own_times() -> None:
    sessions = [Session((Turn(ids=(i,), output_tokens=1),), arrival_s=0.004 * i) for i in range(5)]
    outcome, _ = load(sessions, Load(concurrency=8))
    due = sorted(record.due_s for record in outcome.records)
    assert [round((d - due[0]) * 1e3) for d in due] == [0, 4, 8, 12, 16]


def test_requests_ask_for_usage_greedy_tokens_and_the_full_length() -> None:
    sessions = [Session((Turn(ids=(5, 6, 7), output_tokens=3),))]
    _, server = load(sessions, Load(), Api("m", extra={"top_k": 4, "temperature": 1}))
    assert server.bodies == [
        {
            "model": "m", "stream": True, "stream_options": {"include_usage": True}, "temperature": 1, "max_tokens": 3,
            "ignore_eos": True, "prompt": [5, 6, 7], "top_k": 4,
        }
    ]  # fmt: skip
    assert server.asked[0].headers["authorization"] == "Bearer k"
    _, server = load(sessions, Load(), Api("m", ids=False, ignore_eos=False))
    assert "ignore_eos" not in server.bodies[0]
    assert prompt_tokens(server.bodies[0]) == 3
    assert isinstance(server.bodies[0]["prompt"], str)


@pytest.mark.parametrize("api", [Api("m"), Api("m", ids=False), Api("m", chat=True)], ids=["ids", "text", "chat"])
def test_each_turn_begins_with_all_that_was_said_before(api: Api) -> None:
    [session] = random_sessions(RandomShape(input_len=6, output_len=2, prefix_len=4, num_turns=3), 1, 1)
    outcome, server = load([session], Load(concurrency=1), api)
    assert [record.error for record in outcome.records] == [""] * 3
    if api.chat:
        messages = [body["messages"] for body in server.bodies]
        assert [len(m) for m in messages if isinstance(m, list)] == [1, 3, 5]
        assert isinstance(messages[2], list)
        assert messages[2][:3] == messages[1]
        assert messages[2][1] == {"role": "assistant", "content": " a0 a1"}
        return
    prompts = [body["prompt"] for body in server.bodies]
    answer: object = [7000, 7001] if api.ids else " a0 a1"
    for before, after in itertools.pairwise(prompts):
        assert isinstance(before, (str, list))
        assert isinstance(after, (str, list))
        assert after[: len(before)] == before
        assert after[len(before) :][: len(answer)] == answer  # type: ignore[arg-type]
    assert [prompt_tokens(body) for body in server.bodies] == [10, 18, 26]
    assert [record.input_tokens for record in outcome.records] == [10, 18, 26]


def test_the_last_turn_does_not_ask_for_ids_that_nobody_needs() -> None:
    [session] = random_sessions(RandomShape(input_len=2, output_len=1, num_turns=2), 1, 1)
    _, server = load([session], Load())
    assert ["return_token_ids" in body for body in server.bodies] == [True, False]


def test_turns_after_a_failed_one_are_skipped_and_counted() -> None:
    def second_fails(asked: Asked) -> Answer:
        return whole(500, {"error": {"message": "no"}}) if prompt_tokens(asked.body) > 4 else streamed(asked)

    sessions = random_sessions(RandomShape(input_len=4, output_len=1, num_turns=4), 2, 1)
    outcome, server = load(sessions, Load(), answer=second_fails)
    assert summarize(outcome.records, 1.0, {}).errors == {"http_500": 2, "skipped": 4}
    assert len(server.bodies) == 4


BROKEN: dict[str, tuple[Callable[[Asked], Answer], str, str]] = {
    "refused": (lambda asked: whole(429, {"error": {"message": "queue is full"}}), "http_429", "queue is full"),
    "fastapi": (lambda asked: whole(404, {"detail": "Not Found"}), "http_404", "Not Found"),
    "cut": (lambda asked: Answer(HEAD + tokens(asked), close=True), "disconnected", "closed"),
    "cut before the head": (lambda asked: Answer(b"", close=True), "disconnected", "closed"),
    "event": (
        lambda asked: Answer(HEAD + tokens(asked) + event({"error": {"message": "engine died"}}) + END),
        "stream_error",
        "engine died",
    ),
    "empty": (lambda asked: Answer(HEAD + chunk(b"data: [DONE]\n\n") + END), "empty", "no chunk"),
    "no stream": (lambda asked: whole(200, {"choices": [{"text": "x"}]}), "empty", "no chunk"),
    "garbage": (lambda asked: Answer(b"220 mail.example ESMTP\r\n\r\n"), "protocol", "HTTP/1.1"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_errors_have_their_kind_and_the_servers_words(name: str) -> None:
    answer, kind, words = BROKEN[name]
    reply = post(answer)
    assert reply.error == kind
    assert words in reply.detail
    assert reply.end_s >= reply.start_s


def test_a_null_error_and_quoted_words_are_no_errors() -> None:
    odd = {"choices": [{"text": '"error": "choices":[] "completion_tokens"'}], "error": None}
    reply = post(lambda asked: Answer(HEAD + event(odd) + event(odd) + chunk(b"data: [DONE]\n\n") + END))
    assert (reply.error, len(reply.chunks_s), reply.usage) == ("", 2, b"")


def test_a_silent_server_is_a_timeout() -> None:
    assert post(lambda asked: Answer(b"", hold=True), timeout_s=0.02).error == "timeout"
    half = post(lambda asked: Answer(HEAD + tokens(asked), hold=True), timeout_s=1.0)
    assert (half.error, len(half.chunks_s)) == ("timeout", 2)


def test_nobody_there_is_a_connect_error() -> None:
    async def use(server: SseServer, client: Client) -> Reply:
        with closing(Client("http://127.0.0.1:1/v1", {}, 5.0)) as other:
            return await other.post("/completions", b"{}")

    assert with_server(streamed, use)[0].error == "connect"


def test_a_stream_ended_by_its_connection_is_whole_after_done_only() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    body = b'data: {"choices": [{"text": "x"}]}\n\n'
    assert post(lambda asked: Answer(head + body + b"data: [DONE]\n\n", hold=True)).error == ""
    assert post(lambda asked: Answer(head + body, close=True)).error == "disconnected"


def test_a_kept_connection_that_the_server_has_closed_costs_no_request() -> None:
    """Announces keep-alive, closes all the same: as servers do whose idle time is over."""
    sessions = random_sessions(RandomShape(input_len=2, output_len=1), 6, 1)
    outcome, server = load(sessions, Load(concurrency=1), answer=lambda asked: Answer(streamed(asked).data, close=True))
    assert [record.error for record in outcome.records] == [""] * 6
    assert (len(server.bodies), server.connections) == (6, 6)


def test_without_usage_chunks_are_counted() -> None:
    answer = lambda asked: Answer(HEAD + tokens(asked) + chunk(b"data: [DONE]\n\n") + END)  # noqa: E731
    outcome, _ = load([Session((Turn(ids=(1, 2), output_tokens=3),))], Load(), answer=answer)
    assert (outcome.records[0].input_tokens, outcome.records[0].output_tokens) == (2, 3)


def test_stamps_ascend_between_start_and_end() -> None:
    before = time.perf_counter()
    reply = post(streamed)
    assert before <= reply.start_s <= reply.chunks_s[0] <= reply.chunks_s[-1] <= reply.end_s
    assert len(reply.chunks_s) == 2
