"""Scheduler deployment: one replica = one engine = one placement group. The replica is control plane only.

    bundle 0: this replica            Serve's calls, health, death-watch; never touches torch.cuda
    bundle 1: the actor of rank 0     overlap loop and engine (`deployments.rank`)
    bundle 2..: the other ranks       engines that follow rank 0, with tensor_parallel_size above 1

A request is one unary call, open until all its choices have ended: that is what gives Serve routing, load, drain, cancel and the
loss of a replica. No token passes here: `generate` hands the request to the rank over zmq and waits for its `Ended`.

A replica of which a rank died or hangs, or whose loop stalled for `live_stall_s`, exits at once: open calls fail, Serve drops it from
routing, replaces it and frees its group. A graceful stop would wait for calls that cannot end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Iterable
from typing import NoReturn

import msgspec
import ray
from prometheus_client import Metric
from ray import serve

from deployments.cluster import SchedulerStalled, replica_is_stopping
from deployments.keys import application_key
from deployments.logs import configure_logging
from deployments.metrics import MetricsBridge
from deployments.poller import keep_grpc_polling
from deployments.ranks import Ranks
from overlap_serve.config import EngineSpec, HostFacts, ServeConfig
from overlap_serve.errors import InternalError, RequestError, ServerUnavailable
from overlap_serve.messages import (
    AbortRequest,
    Ended,
    GenerateRequest,
    LoopAnswer,
    PauseState,
    ReplicaStatus,
    decode,
)
from overlap_serve.runtime.control import ProfileAnswer
from overlap_serve.runtime.metric_names import parse
from overlap_serve.runtime.model import cpu_has_bf16, engine_spec
from overlap_serve.runtime.orders import Orders
from overlap_serve.transport import Inbox, Outbox

log = logging.getLogger(__name__)

STATUS_PERIOD_S = 0.25
SILENCE_S = 3.0  # a rank that answers no status call for so long counts as standing still since its last answer
STEP_GRACE_S = 2.0  # the collective has the same timeout and names more of the cause
STOP_TIMEOUT_S = 10.0
STOP_POLL_S = 0.1
REROUTE_S = 1.0  # the loop refuses requests once it drains; until the routers know, it must not
ENDED_GRACE_S = 1.0
EXIT_DELAY_S = 0.5  # lets a failed health check reach the controller before the process goes


class OpenCalls:
    """The calls that wait for their request's end, by (rid, attempt)."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, int], asyncio.Future[None]] = {}

    def open(self, request: GenerateRequest) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[request.rid, request.attempt] = future
        return future

    def end(self, rid: str, attempt: int) -> None:
        """Complete the call; unknown ones were cancelled before."""
        future = self._waiting.pop((rid, attempt), None)
        if future is not None and not future.done():
            future.set_result(None)

    def rids(self) -> list[str]:
        return [rid for rid, _ in self._waiting]

    def forget(self, request: GenerateRequest) -> None:
        self._waiting.pop((request.rid, request.attempt), None)

    def fail_all(self, error: RequestError) -> None:
        """End every call with an error: nothing will end them any more."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)

    def __len__(self) -> int:
        return len(self._waiting)


class Pulse:
    """What the rank said last, and how long ago: health without asking through a busy loop."""

    def __init__(self, ready_stall_s: float) -> None:
        self._ready_stall_s = ready_stall_s
        self._status = ReplicaStatus("", "loading")
        self._answered_at = time.monotonic()

    def beat(self, status: ReplicaStatus) -> None:
        self._status = status
        self._answered_at = time.monotonic()

    def status(self) -> ReplicaStatus:
        """The last status, with the age of the last step grown by the rank's silence."""
        silence_s = time.monotonic() - self._answered_at
        age_s = self._status.last_step_age_s
        if silence_s > SILENCE_S:
            age_s += silence_s
        state = self._status.status
        if state in ("ready", "paused") and age_s > self._ready_stall_s:
            state = "stalled"
        return msgspec.structs.replace(self._status, status=state, last_step_age_s=age_s)


class SchedulerReplica:
    """See the module. The constructor returns when the rank has loaded its weights: Serve routes no call here before."""

    async def __init__(self, config: ServeConfig) -> None:  # type: ignore[misc]  # Ray awaits it
        self._built = False
        configure_logging()
        keep_grpc_polling()
        context = serve.get_replica_context()
        self._config = config
        self._replica = context.replica_tag
        self._draining = False  # the loop was asked to end by itself
        self._stopping = False  # its process will be ended
        self._calls = OpenCalls()
        self._orders = Orders(lambda messages: self._outbox.send(self._endpoint, messages))
        self._pause = PauseState()
        self._profiling = asyncio.Lock()
        self._pulse = Pulse(config.ready_stall_s)
        key = application_key(context.app_name)
        address = f"tcp://{ray.util.get_node_ip_address()}"
        self._inbox = Inbox(address, key)
        self._outbox = Outbox(key, "control_scheduler")
        host = HostFacts(num_cpus=node_cpus(), bf16=cpu_has_bf16(), cuda=config.device == "cuda")
        spec = await asyncio.to_thread(engine_spec, config, host)
        log.info("%s: starting %s", self._replica, describe(spec))
        self._ranks = Ranks(config, spec, key, self._replica)
        self._endpoint = await self._ranks.load(self._inbox.endpoint)
        self._rank = self._ranks.first
        self._pulse.beat(await self._rank.status.remote())
        asyncio.get_running_loop().add_reader(self._inbox.fileno(), self._receive)
        self._receive()
        self._watch_task = asyncio.create_task(self._watch())
        self._poll_task = asyncio.create_task(self._poll())
        self._drain_task = asyncio.create_task(self._drain_when_stopping())
        bridge = MetricsBridge(self._families, context.deployment, context.app_name)
        self._bridge_task = asyncio.create_task(bridge.run())
        log.info("%s: ready at %s", self._replica, self._endpoint)
        self._built = True

    async def generate(self, payload: bytes) -> bytes:
        """One request, given as the transport's encoding of one `GenerateRequest`; returns when all its choices have ended.

        Its output takes the other way (`Route`). Cancelling the call ends the request with cause `client`.
        """
        request = one_request(payload)
        if self._watch_task.done():
            raise draining_error()
        if self._pulse.status().status == "stalled":
            raise SchedulerStalled("the scheduler makes no progress; retry", retry_after_s=1.0)
        future = self._calls.open(request)
        try:
            if not self._outbox.send(self._endpoint, [request]):
                raise ServerUnavailable("the scheduler takes no messages; retry", retry_after_s=1.0)
            await future
        except asyncio.CancelledError:
            self._outbox.send(self._endpoint, [AbortRequest(request.rid, "client")])
            raise
        finally:
            self._calls.forget(request)
        return b""

    async def status(self) -> ReplicaStatus:
        return msgspec.structs.replace(self._pulse.status(), pause=self._pause)

    async def open_requests(self) -> tuple[str, list[str]]:
        """This replica, and the ids of the requests that it will still end."""
        return self._replica, self._calls.rids()

    async def set_paused(self, state: PauseState) -> LoopAnswer:
        """Take new requests, or not. A state that is older than the last one changes nothing."""
        if state.at_ns <= self._pause.at_ns:
            return LoopAnswer("")
        self._pause = state  # before the order is sent, so that orders reach the loop as the states follow each other
        answer = await self._orders.send("pause" if state.paused else "resume")
        self._pulse.beat(await self._rank.status.remote())
        return answer

    async def flush(self, force: bool) -> LoopAnswer:
        """Drop the prefix cache. force: end open requests first; without it, they are the reason to refuse."""
        return await self._orders.send("flush", force=force)

    async def start_profile(self) -> ProfileAnswer:
        async with self._profiling:  # one thread of the rank at most waits for its profiler
            answer: ProfileAnswer = await self._rank.start_profile.remote(self._config.profile_dir)
        return answer

    async def stop_profile(self) -> ProfileAnswer:
        async with self._profiling:
            answer: ProfileAnswer = await self._rank.stop_profile.remote()
        return answer

    async def metrics_snapshot(self) -> bytes:
        """The rank's metrics in the Prometheus text format."""
        snapshot: bytes = await self._rank.metrics_snapshot.remote()
        return snapshot

    async def _families(self) -> Iterable[Metric]:
        return parse(await self.metrics_snapshot())

    def record_replica_metadata(self) -> dict[str, str]:
        """Read by Serve once; static facts for request routers."""
        return {"endpoint": self._endpoint, "model": self._config.model_name}

    async def check_health(self) -> None:
        """Called by Serve. Raises, and ends the process, when the loop stands still with work for `live_stall_s`."""
        age_s = self._pulse.status().last_step_age_s
        if age_s > self._config.live_stall_s:
            if not self._stopping:
                self._stopping = True
                reason = f"no step for {age_s:.0f} s with work to do (live_stall_s {self._config.live_stall_s:g})"
                asyncio.get_running_loop().call_later(EXIT_DELAY_S, self._exit, reason)
            raise RuntimeError(f"{self._replica}: the engine has stalled")

    def _exit(self, reason: str) -> NoReturn:
        """End this process and its ranks, now: open calls fail, and Serve starts another replica in the freed bundles."""
        log.error("%s: %s; exiting with %d open requests", self._replica, reason, len(self._calls))
        self._ranks.kill()
        os._exit(1)

    async def __del__(self) -> None:
        """Called by Serve when the replica has drained: end the loop, then the rank's process."""
        if not self._built:
            return  # the constructor has failed, and said why
        self._stopping = True
        self._poll_task.cancel()
        self._drain_task.cancel()
        self._bridge_task.cancel()
        asyncio.get_running_loop().remove_reader(self._inbox.fileno())
        try:
            await asyncio.wait_for(self._rank.stop.remote(0.0), STOP_TIMEOUT_S)
            await asyncio.wait_for(self._watch_task, STOP_TIMEOUT_S)
        except (asyncio.TimeoutError, ray.exceptions.RayError) as error:
            log.warning("%s: the ranks did not stop in order: %r", self._replica, error)
        self._ranks.kill()
        self._outbox.close()
        self._inbox.close()

    def _receive(self) -> None:
        """zmq's descriptor is edge-triggered: take all there is."""
        while messages := self._inbox.drain():
            for message in messages:
                if isinstance(message, Ended):
                    self._calls.end(message.rid, message.attempt)
                elif isinstance(message, LoopAnswer):
                    self._orders.answered(message)

    async def _watch(self) -> None:
        """Ends the replica's process the moment a rank is lost, for whatever reason but a drain."""
        reason = await self._ranks.end()
        if not self._stopping and (reason or not self._draining):
            self._exit(reason or "the loop has ended")
        if len(self._calls):  # came after the loop's last look; or their `Ended` is still on its way
            await asyncio.sleep(ENDED_GRACE_S)
            self._calls.fail_all(draining_error())

    async def _drain_when_stopping(self) -> None:
        """Serve waits for open calls and then kills; before that, let the loop end what is left with its terminal outputs."""
        while not replica_is_stopping():
            await asyncio.sleep(STOP_POLL_S)
        await asyncio.sleep(REROUTE_S)
        self._draining = True
        with contextlib.suppress(ray.exceptions.RayError):
            await self._rank.stop.remote(self._config.drain_timeout)

    async def _poll(self) -> None:
        """Keeps the pulse. Errors are `_watch`'s business."""
        while True:
            try:
                self._pulse.beat(await self._rank.status.remote())
            except ray.exceptions.RayError:
                return
            if self._config.tensor_parallel_size > 1 and not self._stopping:
                self._check_step()
            await asyncio.sleep(STATUS_PERIOD_S)

    def _check_step(self) -> None:
        """A step that does not end, with all ranks alive: one hangs on the device, and the others wait for it in a collective."""
        age_s = self._pulse.status().last_step_age_s
        if age_s > self._config.rank_timeout + STEP_GRACE_S:
            self._exit(f"no step for {age_s:.0f} s with work to do (rank_timeout {self._config.rank_timeout:g})")


def draining_error() -> ServerUnavailable:
    return ServerUnavailable("this scheduler is shutting down; retry", code="server_draining", retry_after_s=1.0)


def one_request(payload: bytes) -> GenerateRequest:
    messages = decode(payload)
    if len(messages) != 1 or not isinstance(messages[0], GenerateRequest):
        raise InternalError("generate takes exactly one GenerateRequest")
    return messages[0]


def node_cpus() -> int:
    """CPUs of this node as Ray counts them: what the container or the user grants, not what the host has."""
    here = ray.get_runtime_context().get_node_id()
    granted = next((node["Resources"].get("CPU", 0) for node in ray.nodes() if node["NodeID"] == here), 0)
    return max(1, min(int(granted) or 1, os.cpu_count() or 1))


def describe(spec: EngineSpec) -> str:
    return (
        f"{spec.model_name} (engine {spec.engine}, {spec.device}, {spec.dtype}, depth {spec.depth}, "
        f"{spec.tp_size} rank(s) of {spec.num_threads} threads, attention {spec.attention_backend})"
    )
