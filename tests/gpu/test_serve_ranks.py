"""The whole shape on several GPUs: rank actors pinned to GPUs of their own by Ray, NCCL between them, HTTP in front. Answers of one
rank, two replicas side by side, and a rank that dies or stands still under 64 streams: its clients' ends, and the GPUs given back.

A tiny random checkpoint in float32. What runs on CPUs too is in tests/ray/test_tensor_parallel.py.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.serve._private.constants import SERVE_NAMESPACE

from tests.ray.conftest import App, cluster_url, eventually  # noqa: F401  # a fixture
from tests.ray.test_faults import answers, check_documented_ends, loaded, report
from tests.ray.test_tensor_parallel import (
    RANK_TIMEOUT_S,
    ask,
    check_random_load,
    check_reason,
    check_same_answers,
    deployed_ranks,
    folder,  # noqa: F401  # a fixture
    prompts,
    rank_names,
    rank_process,
)

NUM_STREAMS = 64
RECOVERY_S = 90.0
NOTICED_S = {"SIGKILL": 5.0, "SIGSTOP": RANK_TIMEOUT_S + 6.0}

pytestmark = [pytest.mark.gpu, pytest.mark.ray, pytest.mark.timeout(300)]


def gpu_args(**args: object) -> dict[str, object]:
    return {"device": "cuda", "max_running_requests": NUM_STREAMS, "kv_cache_tokens": NUM_STREAMS * 2048, **args}


def gpu_processes() -> list[int]:
    """Process ids that hold memory of any GPU."""
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    return [int(pid) for pid in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]


def free_gpus() -> float:
    return float(ray.available_resources().get("GPU", 0.0))


@pytest.fixture(scope="module")
def num_gpus(cluster_url: str) -> int:  # noqa: F811
    found = int(ray.cluster_resources().get("GPU", 0))
    if found < 2:
        pytest.skip(f"needs 2 GPUs, the cluster has {found}")
    return found


@pytest.fixture(scope="module")
def wanted(cluster_url: str, folder: Path, num_gpus: int) -> list[dict[str, Any]]:  # noqa: F811
    with deployed_ranks(cluster_url, folder, 1, **gpu_args()) as app:
        return [ask(app, prompt, echo=True, logprobs=2) for prompt in prompts()]


def gpus_of_ranks() -> list[str]:
    """What each rank sees, of all engines."""
    actors = [ray.get_actor(name, namespace=SERVE_NAMESPACE) for name in rank_names()]
    calls = [actor.__ray_call__.remote(lambda self: os.environ["CUDA_VISIBLE_DEVICES"]) for actor in actors]
    return sorted(ray.get(calls))


@pytest.mark.parametrize("depth", [1, 0])
def test_ranks_on_two_gpus_give_the_answers_of_one(
    cluster_url: str,  # noqa: F811
    folder: Path,  # noqa: F811
    wanted: list[dict[str, Any]],
    depth: int,
) -> None:
    with deployed_ranks(cluster_url, folder, 2, **gpu_args(overlap_depth=depth)) as app:
        assert gpus_of_ranks() == ["0", "1"]
        check_same_answers(app, wanted)
        check_random_load(app, wanted)


def test_two_replicas_of_one_rank_each_have_a_gpu(
    cluster_url: str,  # noqa: F811
    folder: Path,  # noqa: F811
    wanted: list[dict[str, Any]],
) -> None:
    with deployed_ranks(cluster_url, folder, 1, **gpu_args(scheduler_replicas=2)) as app:
        assert gpus_of_ranks() == ["0", "1"]
        check_same_answers(app, wanted)
        check_random_load(app, wanted)


@pytest.fixture(scope="module")
def app(cluster_url: str, folder: Path, num_gpus: int) -> Iterator[App]:  # noqa: F811
    with deployed_ranks(cluster_url, folder, 2, **gpu_args(rank_timeout=RANK_TIMEOUT_S)) as app:
        yield app


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
def test_a_lost_rank_ends_its_clients_and_gives_the_gpus_back(app: App, num_gpus: int, fault: str, rank: int) -> None:
    """NCCL itself would wait for ten minutes."""
    app.wait_idle()
    before = free_gpus()
    ranks = [rank_process(number) for number in (0, 1)]
    replica = rank_names()[0].rsplit(":", 1)[0]
    with loaded(app, NUM_STREAMS) as load:
        begin_s = time.monotonic()
        ranks[rank].kill() if fault == "SIGKILL" else ranks[rank].suspend()
        ended = check_documented_ends(load, NOTICED_S[fault] + 20)
        recovered_s = eventually(lambda: answers(app), RECOVERY_S, "a new request is answered")
    ended_s = max(outcome.ended_s for outcome in ended)
    report(f"{fault} of rank {rank} of 2 on GPUs, 64 streams", begin_s, ended_s, ended_s - begin_s + recovered_s)
    assert ended_s - begin_s < NOTICED_S[fault]
    check_reason(replica, f"rank {rank}")
    assert not any(process.is_running() for process in ranks)
    assert not {process.pid for process in ranks} & set(gpu_processes())
    app.wait_ready()
    eventually(lambda: free_gpus() == before, 15, "as many GPUs are free as before")
    app.check_sums()
