"""What an ingress replica knows of the rest of the application: statuses, detokenizer endpoints, metrics. Asked by `broadcast`.

Refreshed in the background, so that health and admission answer from memory. A replica that does not answer in time cannot hold up
the answers of the others, and keeps its last answer for KEEP_ROUNDS: late is not dead. An ingress at the end of its CPU takes seconds for
one call over Serve (dozens of turns of a full event loop), while tokens still flow; it must not declare everybody lost.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from typing import Any, Generic, NamedTuple, TypeVar

import ray
from ray.serve.exceptions import DeploymentUnavailableError

from overlap_serve.errors import ServerUnavailable
from overlap_serve.messages import LoopAnswer, PauseState, ReplicaStatus
from overlap_serve.runtime.control import Heard, ProfileAnswer

log = logging.getLogger(__name__)

REFRESH_S = 1.0
FIRST_REFRESH_S = 0.1  # until the application has been seen complete once
ASK_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 1.0
PROFILE_TIMEOUT_S = 120.0  # writing the file of a minute's events takes its time
KEEP_ROUNDS = 3

T = TypeVar("T")


class SchedulerStalled(ServerUnavailable):
    """This scheduler replica takes nothing now; another one may. Nothing of the request has been started."""


class Answers(NamedTuple):
    """Of a deployment's replicas. late: some gave none in time; without it, who is not here is gone. asked: number of replicas."""

    given: list[object]
    late: bool
    asked: int = 0

    def heard(self, kind: type[T]) -> Heard[T]:
        answers = [answer for answer in self.given if isinstance(answer, kind)]
        return Heard(answers, max(self.asked - len(answers), int(self.late)))


class LastHeard(Generic[T]):
    """What each replica of one deployment said last."""

    def __init__(self) -> None:
        self._known: dict[str, T] = {}
        self._late_rounds = 0

    def update(self, answers: dict[str, T], late: bool) -> None:
        """answers: by replica. With some late, those that said nothing keep their last answer, for a few rounds."""
        self._late_rounds = self._late_rounds + 1 if late else 0
        keep = 0 < self._late_rounds <= KEEP_ROUNDS
        self._known = {**self._known, **answers} if keep else answers

    def all(self) -> list[T]:
        """In the order of the replicas' names."""
        return [answer for _, answer in sorted(self._known.items())]


class ServeCluster:
    """Implements `runtime.frontend.Cluster` over the handles of the three deployments."""

    def __init__(self, scheduler: Any, detokenizer: Any, ingress: Any, replica: str) -> None:
        self._scheduler = scheduler
        self._detokenizer = detokenizer
        self._ingress = ingress
        self._replica = replica
        self._statuses: LastHeard[ReplicaStatus] = LastHeard()
        self._endpoints: LastHeard[str] = LastHeard()
        self._replicas: list[ReplicaStatus] = []
        self._detokenizers: list[str] = []
        self._leaving: list[str] = []
        self._leaving_schedulers: list[str] = []
        self._pause = PauseState()
        self._refreshing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def replicas(self) -> list[ReplicaStatus]:
        return self._replicas

    def detokenizers(self) -> list[str]:
        return self._detokenizers

    def leaving_detokenizers(self) -> list[str]:
        """Serve has stopped them and lists them no more, but they wait for their open streams."""
        return self._leaving

    async def held_requests(self) -> set[str] | None:
        """Ids of the requests that schedulers have open. None when one that may have some has not said: it is late, or leaving."""
        answers = await ask(self._scheduler, "open_requests")
        held: dict[str, list[str]] = dict(answer for answer in answers.given if isinstance(answer, tuple))
        if self._leaving_schedulers or not {status.replica for status in self._replicas} <= held.keys():
            return None
        return {rid for rids in held.values() for rid in rids}

    async def metric_snapshots(self) -> list[bytes]:
        """Prometheus texts of every other process of the application."""
        groups = await asyncio.gather(
            ask(self._scheduler, "metrics_snapshot"),
            ask(self._detokenizer, "metrics_snapshot"),
            ask(self._ingress, "metrics_snapshot", self._replica),
        )
        return [snapshot for group in groups for snapshot in group.given if isinstance(snapshot, bytes)]

    async def abort_everywhere(self, label: str | None) -> int:
        """Abort at all other ingress replicas the requests with this client request id (None: all). The sum of their numbers."""
        numbers = await ask(self._ingress, "abort", label, self._replica)
        return sum(number for number in numbers.given if isinstance(number, int))

    async def flush(self, force: bool) -> Heard[LoopAnswer]:
        return (await ask(self._scheduler, "flush", force)).heard(LoopAnswer)

    async def start_profile(self) -> Heard[ProfileAnswer]:
        return (await ask(self._scheduler, "start_profile", timeout_s=PROFILE_TIMEOUT_S)).heard(ProfileAnswer)

    async def stop_profile(self) -> Heard[ProfileAnswer]:
        return (await ask(self._scheduler, "stop_profile", timeout_s=PROFILE_TIMEOUT_S)).heard(ProfileAnswer)

    # -- pause: the newest state holds. Whoever knows a newer one passes it on: this replica to schedulers, in every round, and
    # schedulers in their status to ingress replicas. So it outlives any process but all of them at once.

    def paused(self) -> bool:
        return self._pause.paused

    async def set_paused(self, paused: bool) -> Heard[LoopAnswer]:
        """When it returns, all replicas act on it. New requests are refused first where they arrive, and taken there last."""
        self.learn(PauseState(max(time.time_ns(), self._pause.at_ns + 1), paused))
        state = self._pause
        if paused:
            await ask(self._ingress, "learn_pause", state, self._replica)
        answers = await ask(self._scheduler, "set_paused", state)
        if not paused:
            await ask(self._ingress, "learn_pause", state, self._replica)
        await self.refresh()
        return answers.heard(LoopAnswer)

    def learn(self, state: PauseState) -> None:
        """What another process knows."""
        if state.at_ns > self._pause.at_ns:
            self._pause = state

    async def _pass_on_pause(self) -> None:
        for status in self._replicas:
            self.learn(status.pause)
        if any(status.pause.at_ns < self._pause.at_ns for status in self._replicas):
            await ask(self._scheduler, "set_paused", self._pause)

    # -- rounds

    async def start(self) -> None:
        """First round, then rounds in the background."""
        await self.refresh()
        self._task = asyncio.create_task(self._keep_fresh())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep_fresh(self) -> None:
        seen_complete = False
        while True:
            if not seen_complete and self._replicas and self._detokenizers:
                seen_complete = True
                log.info(
                    "%s: ready, with %d scheduler and %d detokenizer replica(s)",
                    *(self._replica, len(self._replicas), len(self._detokenizers)),
                )
            await asyncio.sleep(REFRESH_S if seen_complete else FIRST_REFRESH_S)
            try:
                await self.refresh()
            except Exception:  # one bad round must not end all later ones
                log.exception("could not refresh the state of the application")

    async def refresh(self) -> None:
        """What it learns is not older than the call."""
        async with self._refreshing:
            await self._refresh()
            await self._pass_on_pause()

    async def _refresh(self) -> None:
        statuses, endpoints = await asyncio.gather(ask(self._scheduler, "status"), ask(self._detokenizer, "endpoint"))
        self._statuses.update({s.replica: s for s in statuses.given if isinstance(s, ReplicaStatus)}, statuses.late)
        self._endpoints.update({e: e for e in endpoints.given if isinstance(e, str)}, endpoints.late)
        before = {status.endpoint for status in self._replicas}
        self._replicas = self._statuses.all()
        unlisted = {*before, *self._leaving_schedulers} - {status.endpoint for status in self._replicas}
        now = set(self._endpoints.all())
        self._leaving, self._leaving_schedulers = await asyncio.gather(
            listening({*self._detokenizers, *self._leaving} - now), listening(unlisted)
        )
        self._detokenizers = sorted(now)


async def ask(handle: Any, method: str, *args: object, timeout_s: float = ASK_TIMEOUT_S) -> Answers:
    """What all replicas answer; nothing when the deployment has none.

    A fresh context: the call belongs to no HTTP request and must not be cancelled with one (RAY.md C, pitfall 2).
    """
    response = contextvars.Context().run(handle.broadcast, method, *args)
    try:
        # results_async() loses all answers when one is late, so the results are gathered here.
        pending = await asyncio.wait_for(response._fetch_replica_results_async(), ASK_TIMEOUT_S)
    except DeploymentUnavailableError:
        return Answers([], late=False)
    except asyncio.TimeoutError:
        return Answers([], late=True)
    tasks = [asyncio.ensure_future(result.get_async()) for result in pending]
    if not tasks:
        return Answers([], late=False)
    done, late = await asyncio.wait(tasks, timeout=timeout_s)
    for task in late:
        task.cancel()
    given = [task.result() for task in tasks if task in done and not task.cancelled() and task.exception() is None]
    return Answers(given, late=bool(late), asked=len(tasks))


async def listening(endpoints: set[str]) -> list[str]:
    """Those that still take connections, in order."""
    ordered = sorted(endpoints)
    answers = await asyncio.gather(*(is_listening(endpoint) for endpoint in ordered))
    return [endpoint for endpoint, up in zip(ordered, answers, strict=True) if up]


async def is_listening(endpoint: str) -> bool:
    """Whether a process accepts connections at a zmq tcp endpoint."""
    host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), PROBE_TIMEOUT_S)
    except (OSError, asyncio.TimeoutError):
        return False
    writer.close()
    return True


def replica_is_stopping() -> bool:
    """Whether Serve has begun to stop this replica. Serve tells user code only after the drain, too late to refuse and end requests."""
    worker = ray._private.worker.global_worker
    actor = worker.actors[worker.actor_id]
    return bool(actor._replica_impl._shutting_down)
