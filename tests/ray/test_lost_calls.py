"""Calls whose scheduler has vanished without a sign: told apart from those that only take long. Needs no cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from deployments.cluster import ServeCluster
from deployments.ingress import SchedulerCalls
from overlap_serve.errors import ServerUnavailable
from overlap_serve.messages import GenerateRequest, ReplicaStatus, Route
from overlap_serve.sampling import SamplingParams, TextParams

REQUEST = GenerateRequest("r", 0, b"", 1, SamplingParams(max_tokens=1), TextParams(), Route("", ""))
NUM_LOOKS = 5


class Silent:
    """Handle of a scheduler that takes a request and is not heard of again."""

    class generate:  # noqa: N801
        @staticmethod
        def remote(payload: bytes) -> asyncio.Future[None]:
            return asyncio.get_running_loop().create_future()


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.ingress.LOOK_S", 0.0)
    monkeypatch.setattr("deployments.ingress.OLD_S", -1.0)


async def call_while_told(answers: list[set[str] | None]) -> asyncio.Task[None]:
    """One call, and looks that get these answers (the last for ever); the call after NUM_LOOKS of them."""
    calls = SchedulerCalls(Silent)
    looked = asyncio.Event()
    num_looks = 0

    async def held() -> set[str] | None:
        nonlocal num_looks
        num_looks += 1
        if num_looks >= NUM_LOOKS:
            looked.set()
        return answers[min(num_looks, len(answers)) - 1]

    call = asyncio.create_task(calls(REQUEST))
    watch = asyncio.create_task(calls.watch(held))
    await asyncio.wait({call, asyncio.create_task(looked.wait())}, timeout=5, return_when=asyncio.FIRST_COMPLETED)
    watch.cancel()
    return call


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def test_a_call_that_no_scheduler_has_fails_as_if_its_engine_had_died() -> None:
    async def scenario() -> None:
        call = await call_while_told([{"other"}])
        with pytest.raises(ServerUnavailable) as raised:
            await asyncio.wait_for(call, 1)
        assert raised.value.code == "engine_failed"

    run(scenario())


@pytest.mark.parametrize(
    "answers",
    [[{"r"}], [None], [set(), {"r"}], [set(), None, set(), None, set(), {"r"}]],
    ids=["held", "not-all-have-said", "missed-once", "missed-not-twice-in-a-row"],
)
def test_a_call_goes_on_while_a_scheduler_has_or_may_have_it(answers: list[set[str] | None]) -> None:
    async def scenario() -> None:
        call = await call_while_told(answers)
        assert not call.done()
        call.cancel()

    run(scenario())


def test_a_young_call_may_still_be_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.ingress.OLD_S", 60.0)

    async def scenario() -> None:
        calls = SchedulerCalls(Silent)
        call = asyncio.create_task(calls(REQUEST))
        await asyncio.sleep(0)

        async def held() -> set[str]:
            pytest.fail("nobody need be asked")

        assert await calls._look(held, {"r"}) == set()
        assert not call.done()
        call.cancel()

    run(scenario())


class Pool:
    """Handle whose replicas answer each method at once; None: never."""

    def __init__(self, answers: dict[str, list[object]]) -> None:
        self._answers = answers

    def broadcast(self, method: str, *args: object) -> Pool:
        self._asked = self._answers[method]
        return self

    async def _fetch_replica_results_async(self) -> list[Answer]:
        return [Answer(value) for value in self._asked]


class Answer:
    def __init__(self, value: object) -> None:
        self._value = value

    async def get_async(self) -> object:
        return await asyncio.Event().wait() if self._value is None else self._value


@pytest.mark.parametrize(
    ("given", "held"),
    [
        ([("a", ["1", "2"]), ("b", ["3"])], {"1", "2", "3"}),
        ([("a", ["1"]), None], None),
        ([("a", []), ("b", []), None], set()),  # the third is known to be gone
    ],
)
def test_what_schedulers_have_is_known_when_all_known_ones_have_said(
    given: list[object], held: set[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.cluster.ask.__kwdefaults__", {"timeout_s": 0.05})

    async def scenario() -> None:
        statuses: list[object] = [ReplicaStatus(name, "ready", endpoint="tcp://127.0.0.1:1") for name in ("a", "b")]
        schedulers = Pool({"status": statuses, "open_requests": given})
        cluster = ServeCluster(schedulers, Pool({"endpoint": []}), Pool({}), "ingress")
        await cluster.refresh()
        assert await cluster.held_requests() == held

    run(scenario())


def test_a_scheduler_that_serve_has_stopped_may_still_have_requests_while_it_listens() -> None:
    async def scenario() -> None:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        endpoint = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        answers: dict[str, list[object]] = {"status": [ReplicaStatus("a", "ready", endpoint=endpoint)]}
        answers["open_requests"] = []
        cluster = ServeCluster(Pool(answers), Pool({"endpoint": []}), Pool({}), "ingress")
        await cluster.refresh()
        answers["status"] = []
        await cluster.refresh()
        assert await cluster.held_requests() is None
        server.close()
        await server.wait_closed()
        await cluster.refresh()
        assert await cluster.held_requests() == set()

    run(scenario())
