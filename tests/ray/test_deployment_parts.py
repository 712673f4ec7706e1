"""Parts of the deployments that need no cluster."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import ray
from ray.serve._private.application_state import ApplicationStatusInfo, StatusOverview
from ray.serve._private.common import (
    DeploymentID,
    DeploymentStatus,
    DeploymentStatusInfo,
    DeploymentStatusTrigger,
)
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.schema import ApplicationStatus

from deployments.app import build, cluster_has_gpu, decide_device, torch_has_cuda
from deployments.cluster import KEEP_ROUNDS, LastHeard, SchedulerStalled, is_listening
from deployments.ingress import STALLED_RETRIES, SchedulerCalls, as_request_error
from deployments.metrics import RayExporter
from deployments.run import reasons
from deployments.scheduler import OpenCalls, Pulse, draining_error, one_request
from overlap_serve.config import ServeConfig
from overlap_serve.errors import ContextLengthExceeded, InternalError, RequestError, ServerUnavailable
from overlap_serve.messages import AbortRequest, GenerateRequest, Message, ReplicaStatus, Route, encode
from overlap_serve.runtime.metric_names import Series
from overlap_serve.sampling import SamplingParams, TextParams
from overlap_serve.transport import Inbox
from tests.ray.conftest import free_port

REQUEST = GenerateRequest("r", 0, b"", 1, SamplingParams(max_tokens=1), TextParams(), Route("", ""))


def test_a_call_ends_with_its_own_attempt_only() -> None:
    async def scenario() -> None:
        calls = OpenCalls()
        future = calls.open(REQUEST)
        calls.end("r", 1)
        calls.end("unknown", 0)
        assert not future.done() and len(calls) == 1
        calls.end("r", 0)
        await asyncio.wait_for(future, 1)
        assert len(calls) == 0

    asyncio.run(scenario())


def test_calls_that_nobody_will_end_fail() -> None:
    async def scenario() -> None:
        calls = OpenCalls()
        future = calls.open(REQUEST)
        calls.fail_all(draining_error())
        with pytest.raises(ServerUnavailable) as raised:
            await asyncio.wait_for(future, 1)
        assert raised.value.code == "server_draining"

    asyncio.run(scenario())


def test_pulse_calls_a_rank_stalled_that_makes_no_progress() -> None:
    pulse = Pulse(ready_stall_s=15.0)
    assert pulse.status().status == "loading"
    pulse.beat(ReplicaStatus("s", "ready", last_step_age_s=14.0))
    assert pulse.status().status == "ready"
    pulse.beat(ReplicaStatus("s", "ready", last_step_age_s=16.0))
    assert pulse.status().status == "stalled"


def test_pulse_grows_the_age_while_a_rank_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    pulse = Pulse(ready_stall_s=15.0)
    pulse.beat(ReplicaStatus("s", "ready"))
    heard = time.monotonic()
    monkeypatch.setattr("deployments.scheduler.time.monotonic", lambda: heard + 2.0)
    assert pulse.status().last_step_age_s == 0.0
    monkeypatch.setattr("deployments.scheduler.time.monotonic", lambda: heard + 20.0)
    assert pulse.status().last_step_age_s == pytest.approx(20.0, abs=0.1)
    assert pulse.status().status == "stalled"


def test_generate_takes_exactly_one_request() -> None:
    assert one_request(encode([REQUEST])) == REQUEST
    wrong: list[list[Message]] = [[], [REQUEST, REQUEST], [AbortRequest("r", "client")]]
    for messages in wrong:
        with pytest.raises(InternalError):
            one_request(encode(messages))


@pytest.mark.parametrize(
    ("error", "http_status", "code"),
    [
        (ContextLengthExceeded("too long"), 400, "context_length_exceeded"),
        (BackPressureError(3, 2), 429, "queue_full"),
        (DeploymentUnavailableError(DeploymentID("Scheduler", "app")), 503, "engine_failed"),
        (ray.exceptions.ActorDiedError(), 503, "engine_failed"),
        (ray.exceptions.ActorUnavailableError("gone", None), 503, "engine_failed"),
        (RuntimeError("anything"), 503, "engine_failed"),
    ],
)
def test_a_failed_call_becomes_an_error_of_the_http_api(error: Exception, http_status: int, code: str) -> None:
    mapped: RequestError = as_request_error(error)
    assert (mapped.http_status, mapped.code) == (http_status, code)
    assert http_status == 400 or mapped.retry_after_s is not None


def test_a_request_error_inside_a_ray_error_stays_itself() -> None:
    inner = ContextLengthExceeded("too long", param="prompt")
    error = ray.exceptions.RayTaskError("generate", "traceback", inner)
    assert as_request_error(error) is inner


def test_device_is_decided_before_any_engine_process_exists() -> None:
    assert decide_device(ServeConfig(device="cuda")) == "cuda"
    assert decide_device(ServeConfig(engine="fake")) == "cpu"
    assert decide_device(ServeConfig()) == ("cuda" if torch_has_cuda() and cluster_has_gpu() else "cpu")


def test_build_starts_nothing() -> None:
    before = ray.is_initialized()  # by the session's cluster
    build(ServeConfig(engine="fake"))
    assert ray.is_initialized() == before


def test_a_late_replica_keeps_its_last_answer_for_some_rounds_and_a_gone_one_does_not() -> None:
    heard: LastHeard[int] = LastHeard()
    heard.update({"a": 1, "b": 2}, late=False)
    heard.update({"b": 3}, late=True)
    assert heard.all() == [1, 3]
    heard.update({"b": 4}, late=False)  # a's call failed: it has died
    assert heard.all() == [4]
    for _ in range(KEEP_ROUNDS):
        heard.update({}, late=True)
        assert heard.all() == [4]
    heard.update({}, late=True)
    assert heard.all() == []


def test_only_a_listening_endpoint_counts_as_up() -> None:
    inbox = Inbox("tcp://127.0.0.1", b"key")
    assert asyncio.run(is_listening(inbox.endpoint))
    assert not asyncio.run(is_listening(f"tcp://127.0.0.1:{free_port()}"))
    inbox.close()


class FakeCounter:
    """Takes what Ray's takes: `inc` refuses what is not positive."""

    def __init__(self, name: str, text: str, tag_keys: tuple[str, ...]) -> None:
        self.recorded: list[float] = []

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0
        self._record(value, tags)

    def _record(self, value: float, tags: dict[str, str]) -> None:
        self.recorded.append(value)


def test_counters_reach_ray_by_their_growth_and_from_zero_on(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FakeCounter] = []

    def make(*arguments: Any) -> FakeCounter:
        made.append(FakeCounter(*arguments))
        return made[-1]

    monkeypatch.setattr("deployments.metrics.Counter", make)
    exporter = RayExporter()
    for value in (0.0, 0.0, 3.0, 3.0, 10.0):
        exporter.publish([Series(True, "c_total", "", (("replica", "r"),), value)])
    exporter.publish([Series(True, "c_total", "", (("replica", "other"),), 5.0)])
    (counter,) = made
    assert counter.recorded == [0.0, 3.0, 7.0, 5.0]


def test_calls_that_fail_together_are_one_line_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead:
        class generate:  # noqa: N801  # stands for a method of a handle
            @staticmethod
            async def remote(payload: bytes) -> None:
                raise ray.exceptions.ActorDiedError

    async def scenario() -> None:
        calls = SchedulerCalls(Dead)
        ends = await asyncio.gather(*(calls(REQUEST) for _ in range(5)), return_exceptions=True)
        assert {type(end) for end in ends} == {ServerUnavailable}
        await asyncio.sleep(0.05)

    monkeypatch.setattr("deployments.ingress.NOTE_AFTER_S", 0.01)
    lines: list[str] = []
    monkeypatch.setattr("deployments.ingress.log.warning", lambda text, *values: lines.append(text % values))
    asyncio.run(scenario())
    assert lines == ["5 scheduler calls failed: 5 ActorDiedError"]


@pytest.mark.parametrize(("refusals", "fails"), [(0, False), (3, False), (99, True)])
def test_a_stalled_scheduler_is_asked_again_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, refusals: int, fails: bool
) -> None:
    asked: list[bytes] = []

    class Stalled:
        class generate:  # noqa: N801  # stands for a method of a handle
            @staticmethod
            async def remote(payload: bytes) -> None:
                asked.append(payload)
                if len(asked) <= refusals:
                    raise SchedulerStalled("stalled", retry_after_s=1.0)

    monkeypatch.setattr("deployments.ingress.STALLED_PAUSE_S", 0.0)
    if fails:
        with pytest.raises(ServerUnavailable):
            asyncio.run(SchedulerCalls(Stalled)(REQUEST))
        assert len(asked) == STALLED_RETRIES + 1
    else:
        asyncio.run(SchedulerCalls(Stalled)(REQUEST))
        assert len(asked) == refusals + 1


def test_the_reason_of_a_failed_deployment_is_its_last_line() -> None:
    error = "Error:\nTraceback (most recent call last):\n  File x\noverlap_serve.errors.ModelLoadError: no weights\n\n"
    fine = DeploymentStatusInfo("Ingress", DeploymentStatus.HEALTHY, DeploymentStatusTrigger.UNSPECIFIED)
    bad = DeploymentStatusInfo("Scheduler", DeploymentStatus.UNHEALTHY, DeploymentStatusTrigger.UNSPECIFIED, error)
    state = ApplicationStatusInfo(ApplicationStatus.DEPLOY_FAILED, "Failed to update")
    assert (
        reasons(StatusOverview(state, "a", [fine, bad])) == "Scheduler: overlap_serve.errors.ModelLoadError: no weights"
    )
    assert reasons(StatusOverview(state, "a", [fine])) == "Failed to update"
