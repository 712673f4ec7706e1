"""Ingress deployment: HTTP in, one Serve call per prompt to a scheduler replica, text back over zmq.

The ASGI app is built inside the replica, around the replica's own `Frontend`. Nothing here or below imports torch.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import ray
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Metric
from ray import serve
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from deployments.cluster import SchedulerStalled, ServeCluster, replica_is_stopping
from deployments.http import build_http_app
from deployments.keys import application_key
from deployments.logs import configure_logging
from deployments.metrics import MetricsBridge
from deployments.poller import keep_grpc_polling
from overlap_serve.config import ServeConfig
from overlap_serve.errors import QueueFull, RequestError, ServerUnavailable
from overlap_serve.messages import GenerateRequest, PauseState, encode
from overlap_serve.runtime.frontend import Frontend
from overlap_serve.runtime.model import model_facts, text_model

log = logging.getLogger(__name__)

STOP_POLL_S = 0.1
RETRY_AFTER_S = 1.0
NOTE_AFTER_S = 0.5
STALLED_RETRIES = 12  # Serve chooses at random: between two replicas, all of these miss with 1 in 8,192
STALLED_PAUSE_S = 0.05
LOOK_S = 2.0
OLD_S = 10.0  # a younger call may still be on its way to a scheduler


@dataclass
class OpenCall:
    response: Any
    begun_s: float
    lost: bool = False

    def lose(self) -> None:
        self.lost = True
        self.response.cancel()


class SchedulerCalls:
    """Implements `runtime.frontend.Submit`: the open unary call of a request.

    The call goes over gRPC (`_by_reference=False`, fixed where the handle is made) and in a fresh context: Serve files pending calls
    under the id of the HTTP request, and two at a time under one id can hang (RAY.md C, pitfall 2). So it is also cancelled by hand.
    """

    def __init__(self, scheduler: Any) -> None:
        self._generate = scheduler.generate
        self._failures: Counter[str] = Counter()
        self._open: dict[str, OpenCall] = {}

    async def __call__(self, request: GenerateRequest) -> None:
        """Returns when the scheduler is done with the request. Raises a RequestError when it never will be.

        Serve's routing does not know of stalled engines: a replica that refuses for that is asked again, with luck another one.
        """
        for _ in range(STALLED_RETRIES):
            try:
                return await self._call(request)
            except SchedulerStalled:
                await asyncio.sleep(STALLED_PAUSE_S)
        return await self._call(request)

    async def _call(self, request: GenerateRequest) -> None:
        response = contextvars.Context().run(self._generate.remote, encode([request]))
        call = self._open[request.rid] = OpenCall(response, time.monotonic())
        try:
            await response
        except asyncio.CancelledError:
            if call.lost:
                raise as_request_error(ConnectionError("the scheduler is gone")) from None
            response.cancel()
            raise
        except Exception as error:
            known = as_request_error(error)
            if isinstance(known, SchedulerStalled):
                raise known from None
            if known.code == ServerUnavailable.code:
                self._note(error)
            raise known from error
        finally:
            del self._open[request.rid]

    async def watch(self, held: Callable[[], Awaitable[set[str] | None]]) -> None:
        """For ever: end the calls whose requests no scheduler has. held: see `ServeCluster.held_requests`.

        A node that vanishes closes no connection. Such a call would return only minutes later (134 s, with Ray's settings), and one
        that was being routed there waits as long; neither says which replica it waits for, but the others can say what they have.
        """
        suspects: set[str] = set()
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                suspects = await self._look(held, suspects)
            except Exception:  # one bad round must not end all later ones
                log.exception("could not ask the schedulers for their requests")

    async def _look(self, held: Callable[[], Awaitable[set[str] | None]], suspects: set[str]) -> set[str]:
        """Open requests that nobody has. suspects: those of the look before; what is missing twice is lost."""
        begun_before_s = time.monotonic() - OLD_S
        old = {rid for rid, call in self._open.items() if call.begun_s < begun_before_s}
        known = await held() if old else None
        if known is None:
            return set()
        missing = (old - known) & self._open.keys()
        if lost := missing & suspects:
            log.warning("%d requests are at no scheduler any more", len(lost))
        for rid in lost:
            self._open[rid].lose()
        return missing - lost

    def _note(self, error: Exception) -> None:
        """One line for all the calls that fail together, when a replica dies (Ray #61219: a traceback for each)."""
        if not self._failures:
            asyncio.get_running_loop().call_later(NOTE_AFTER_S, self._log_failures)
        self._failures[type(error).__name__] += 1

    def _log_failures(self) -> None:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self._failures.items())
        log.warning("%d scheduler calls failed: %s", self._failures.total(), kinds)
        self._failures.clear()


def as_request_error(error: Exception) -> RequestError:
    """What a failed scheduler call means for the client."""
    if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, RequestError):
        return error.cause
    if isinstance(error, RequestError):
        return error
    if isinstance(error, BackPressureError):
        return QueueFull("too many requests are waiting; retry later", retry_after_s=RETRY_AFTER_S)
    if isinstance(error, DeploymentUnavailableError):
        return ServerUnavailable("no scheduler is available; retry later", retry_after_s=RETRY_AFTER_S)
    # Actor died or unreachable, or any error of the replica: its engine is lost for this request. The class of the error does not
    # tell whose actor died (RAY.md E), so all of these read the same to the client.
    return ServerUnavailable("the engine that served this request failed; retry", retry_after_s=RETRY_AFTER_S)


@serve.ingress()
class IngressReplica:
    """One HTTP server process. `scheduler`, `detokenizer`: handles of the other deployments."""

    async def __init__(self, config: ServeConfig, scheduler: Any, detokenizer: Any) -> None:  # type: ignore[misc]  # Ray awaits it
        self._built = False
        configure_logging()
        keep_grpc_polling()
        context = serve.get_replica_context()
        self._replica = context.replica_tag
        self._drain_timeout_s = config.drain_timeout
        self._drain_began_s: float | None = None
        own = serve.get_deployment_handle(context.deployment, context.app_name)
        calls, pool, peers = (h.options(_by_reference=False) for h in (scheduler, detokenizer, own))
        self._cluster = ServeCluster(calls, pool, peers, context.replica_tag)
        self._registry = CollectorRegistry()
        submit = SchedulerCalls(calls)
        text = await asyncio.to_thread(text_model, config)
        self._frontend = Frontend(
            config,
            text,
            await asyncio.to_thread(model_facts, config),
            bind=f"tcp://{ray.util.get_node_ip_address()}",
            key=application_key(context.app_name),
            submit=submit,
            cluster=self._cluster,
            replica=context.replica_tag,
            registry=self._registry,
        )
        await self._cluster.start()
        await self._frontend.start()
        self._watch_task = asyncio.create_task(submit.watch(self._cluster.held_requests))
        self._stop_task = asyncio.create_task(self._drain_when_stopping())
        bridge = MetricsBridge(self._families, context.deployment, context.app_name)
        self._bridge_task = asyncio.create_task(bridge.run())
        self._built = True

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve in the replica, after the constructor."""
        return build_http_app(self._frontend, host_labels=True)

    async def metrics_snapshot(self, asking: str) -> bytes:
        """This process' metrics in the Prometheus text format; nothing for itself, which has them at hand."""
        return b"" if asking == self._replica else self._frontend.metrics_snapshot()

    async def abort(self, label: str | None, asking: str) -> int:
        """`Frontend.abort` for another ingress replica; nothing for itself, which has done it."""
        return 0 if asking == self._replica else self._frontend.abort(label)

    async def learn_pause(self, state: PauseState, asking: str) -> None:
        """From another ingress replica, which an administrator has told; the one that asks knows."""
        if asking != self._replica:
            self._cluster.learn(state)
            await self._cluster.refresh()

    async def drain(self) -> int:
        """Refuse new requests from now on; how many are open. For whoever is about to delete the application: while Serve still
        routes here, clients are told to come back, and after it they would get Serve's own 404."""
        self._begin_drain()
        return self._frontend.num_open

    async def __del__(self) -> None:
        """Called by Serve when the replica has drained."""
        if not self._built:
            return  # the constructor has failed, and said why
        await self._stop_task
        self._bridge_task.cancel()
        self._watch_task.cancel()
        await self._cluster.close()

    async def _families(self) -> Iterable[Metric]:
        return self._registry.collect()

    async def _drain_when_stopping(self) -> None:
        """Serve waits for open requests but tells nobody; refuse new ones at once and end the rest after drain_timeout."""
        while not replica_is_stopping():
            await asyncio.sleep(STOP_POLL_S)
        deadline_s = self._begin_drain() + self._drain_timeout_s
        while self._frontend.num_open and time.monotonic() < deadline_s:
            await asyncio.sleep(STOP_POLL_S)
        await self._frontend.close()

    def _begin_drain(self) -> float:
        """When it began, by the monotonic clock; idempotent."""
        if self._drain_began_s is None:
            self._drain_began_s = time.monotonic()
            self._frontend.drain()
            log.info("%s: draining, %d open requests", self._replica, self._frontend.num_open)
        return self._drain_began_s
