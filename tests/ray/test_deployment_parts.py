"""Parts of the deployments that need no cluster."""

from __future__ import annotations

import asyncio
import time

import pytest
import ray
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from deployments.app import build, cluster_has_gpu, decide_device, torch_has_cuda
from deployments.cluster import is_listening
from deployments.ingress import as_request_error
from deployments.scheduler import OpenCalls, Pulse, draining_error, one_request
from overlap_serve.config import ServeConfig
from overlap_serve.errors import ContextLengthExceeded, InternalError, RequestError, ServerUnavailable
from overlap_serve.messages import AbortRequest, GenerateRequest, Message, ReplicaStatus, Route, encode
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


def test_only_a_listening_endpoint_counts_as_up() -> None:
    inbox = Inbox("tcp://127.0.0.1", b"key")
    assert asyncio.run(is_listening(inbox.endpoint))
    assert not asyncio.run(is_listening(f"tcp://127.0.0.1:{free_port()}"))
    inbox.close()
