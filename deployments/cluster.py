"""What an ingress replica knows of the rest of the application: statuses, detokenizer endpoints, metrics. Asked by `broadcast`.

Refreshed in the background, so that health and admission answer from memory. A replica that does not answer in time is left out
of that round; it cannot hold up the answers of the others.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from typing import Any

import ray
from ray.serve.exceptions import DeploymentUnavailableError

from overlap_serve.messages import ReplicaStatus

log = logging.getLogger(__name__)

REFRESH_S = 1.0
FIRST_REFRESH_S = 0.1  # until the application has been seen complete once
ASK_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 1.0


class ServeCluster:
    """Implements `runtime.frontend.Cluster` over the handles of the three deployments."""

    def __init__(self, scheduler: Any, detokenizer: Any, ingress: Any, replica: str) -> None:
        self._scheduler = scheduler
        self._detokenizer = detokenizer
        self._ingress = ingress
        self._replica = replica
        self._replicas: list[ReplicaStatus] = []
        self._detokenizers: list[str] = []
        self._leaving: list[str] = []
        self._task: asyncio.Task[None] | None = None

    def replicas(self) -> list[ReplicaStatus]:
        return self._replicas

    def detokenizers(self) -> list[str]:
        return self._detokenizers

    def leaving_detokenizers(self) -> list[str]:
        """Serve has stopped them and lists them no more, but they wait for their open streams."""
        return self._leaving

    async def metric_snapshots(self) -> list[bytes]:
        """Prometheus texts of every other process of the application."""
        groups = await asyncio.gather(
            ask(self._scheduler, "metrics_snapshot"),
            ask(self._detokenizer, "metrics_snapshot"),
            ask(self._ingress, "metrics_snapshot", self._replica),
        )
        return [snapshot for group in groups for snapshot in group if isinstance(snapshot, bytes)]

    async def start(self) -> None:
        """First round, then rounds in the background."""
        await self._refresh()
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
                await self._refresh()
            except Exception:  # one bad round must not end all later ones
                log.exception("could not refresh the state of the application")

    async def _refresh(self) -> None:
        statuses, endpoints = await asyncio.gather(ask(self._scheduler, "status"), ask(self._detokenizer, "endpoint"))
        self._replicas = sorted((s for s in statuses if isinstance(s, ReplicaStatus)), key=lambda s: s.replica)
        now = {endpoint for endpoint in endpoints if isinstance(endpoint, str)}
        unlisted = sorted({*self._detokenizers, *self._leaving} - now)
        answers = await asyncio.gather(*(is_listening(endpoint) for endpoint in unlisted))
        self._leaving = [endpoint for endpoint, up in zip(unlisted, answers, strict=True) if up]
        self._detokenizers = sorted(now)


async def ask(handle: Any, method: str, *args: str) -> list[object]:
    """The answers of all replicas that gave one in time; none when the deployment has no replica.

    A fresh context: the call belongs to no HTTP request and must not be cancelled with one (RAY.md C, pitfall 2).
    """
    response = contextvars.Context().run(handle.broadcast, method, *args)
    try:
        # results_async() loses all answers when one is late, so the results are gathered here.
        pending = await asyncio.wait_for(response._fetch_replica_results_async(), ASK_TIMEOUT_S)
    except (DeploymentUnavailableError, asyncio.TimeoutError):
        return []
    tasks = [asyncio.ensure_future(result.get_async()) for result in pending]
    done, late = await asyncio.wait(tasks, timeout=ASK_TIMEOUT_S)
    for task in late:
        task.cancel()
    return [task.result() for task in tasks if task in done and not task.cancelled() and task.exception() is None]


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
