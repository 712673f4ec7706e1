"""One engine on two ranks, each a process of its own in its bundle: the answers of one rank, over HTTP; and the end of all ranks when
one dies, stands still or does not load.

A tiny random checkpoint in float32 and gloo. Prints times for docs/operations.md, as test_faults.py does.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray
from ray import serve
from ray.serve._private import api as serve_api
from ray.serve._private.constants import SERVE_NAMESPACE
from ray.serve.schema import ServeDeploySchema
from ray.util.placement_group import placement_group_table

from deployments.app import build
from overlap_serve.cli import main as overlap_serve
from overlap_serve.config import parse_config
from tests.models.checkpoints import make_checkpoint
from tests.ray.broken import LongLoadingScheduler, LowMemoryScheduler
from tests.ray.conftest import APP_NAME, App, deployed, eventually, processes
from tests.ray.test_faults import (
    NUM_QUEUED,
    NUM_STREAMS,
    RANK,
    SCHEDULER,
    answers,
    check_documented_ends,
    held,
    loaded,
    report,
)
from tests.tp_rig import write_tokenizer

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

VOCAB = 101
MAX_MODEL_LEN = 2048
NUM_TOKENS = 40
KV_TOKENS = NUM_STREAMS * MAX_MODEL_LEN
RANK_TIMEOUT_S = 4.0
NOTICED_S = {"SIGKILL": 3.0, "SIGSTOP": RANK_TIMEOUT_S + 5.0}
RECOVERY_S = 60.0
LOAD_FAILED_S = 90.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(folder, vocab_size=VOCAB, max_position_embeddings=MAX_MODEL_LEN)
    write_tokenizer(folder, VOCAB)
    return folder


def torch_args(folder: Path, size: int, **args: object) -> dict[str, object]:
    return {
        "model": str(folder),
        "device": "cpu",
        "dtype": "float32",
        "num_threads": 1,
        "tensor_parallel_size": size,
        "kv_cache_tokens": KV_TOKENS,
        "max_running_requests": NUM_STREAMS,
        "drain_timeout": 20.0,
        **args,
    }


@contextmanager
def deployed_ranks(url: str, folder: Path, size: int, **args: object) -> Iterator[App]:
    with deployed(url, **torch_args(folder, size, **args)) as app:
        assert app.config.kv_cache_tokens is not None
        app.num_pages = app.config.kv_cache_tokens // app.config.page_size * app.config.scheduler_replicas
        yield app


# -- the answers of one rank


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (1, 2, 5, 17, 40, 90, 200, 600)]


def ask(app: App, prompt: list[int], **more: object) -> dict[str, Any]:
    """The only choice of a greedy completion."""
    body = app.completion(prompt=prompt, max_tokens=NUM_TOKENS, **more)
    answer = app.http.post("/v1/completions", json=body).raise_for_status()
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def ask_streamed(app: App, prompt: list[int]) -> str:
    body = app.completion(prompt=prompt, max_tokens=NUM_TOKENS, stream=True)
    with app.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    chunks = (json.loads(line)["choices"] for line in lines)
    return "".join(choices[0]["text"] for choices in chunks if choices)


@pytest.fixture(scope="module")
def wanted(cluster_url: str, folder: Path) -> list[dict[str, Any]]:
    """Each prompt's completion, with echo and logprobs, by one rank."""
    with deployed_ranks(cluster_url, folder, 1) as app:
        assert len(processes(RANK)) == 1
        return [ask(app, prompt, echo=True, logprobs=2) for prompt in prompts()]


def check_same_answers(app: App, wanted: list[dict[str, Any]]) -> None:
    """Whole and streamed, with log-probabilities of prompt and output and without."""
    for prompt, choice in zip(prompts(), wanted, strict=True):
        own = ask(app, prompt, echo=True, logprobs=2)
        assert own["text"] == choice["text"]
        scores, wanted_scores = own["logprobs"], choice["logprobs"]
        assert scores["tokens"] == wanted_scores["tokens"]
        assert len(scores["tokens"]) == len(prompt) + NUM_TOKENS
        assert scores["token_logprobs"][1:] == pytest.approx(wanted_scores["token_logprobs"][1:], abs=1e-3)
        text = ask(app, prompt)["text"]
        assert text.split() == choice["text"].split()[len(prompt) :]
        assert ask_streamed(app, prompt) == text


async def stream(http: httpx.AsyncClient, app: App, rng: random.Random, words: list[list[str]]) -> str:
    """A stream of a prompt whose output is known; how it ended. A fifth of the clients leave."""
    number, num_tokens = rng.randrange(len(words)), rng.randint(1, NUM_TOKENS)
    leaves_after = rng.randint(0, num_tokens - 1) if rng.random() < 0.2 else None
    body = app.completion(prompt=prompts()[number], max_tokens=num_tokens, stream=True)
    text, num_chunks = "", 0
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if num_chunks == leaves_after:
                return "left"
            if line.startswith("data: {"):
                num_chunks += 1
                text += "".join(choice["text"] for choice in json.loads(line.removeprefix("data: "))["choices"])
    return "right" if text.split() == words[number][:num_tokens] else "wrong"


async def load(app: App, words: list[list[str]], num_clients: int, num_requests: int) -> Counter[str]:
    rng = random.Random(3)
    numbers = iter(range(num_requests))

    async def client(http: httpx.AsyncClient) -> list[str]:
        return [await stream(http, app, rng, words) for _ in numbers]

    async with httpx.AsyncClient(base_url=app.url, timeout=60) as http:
        ends = await asyncio.gather(*(client(http) for _ in range(num_clients)))
    return Counter(end for own in ends for end in own)


def check_random_load(app: App, wanted: list[dict[str, Any]]) -> None:
    """Streams of every length side by side, of which a fifth ends early: all others have the tokens that they have alone."""
    words = [choice["text"].split()[len(prompt) :] for choice, prompt in zip(wanted, prompts(), strict=True)]
    num_requests = 100
    ends = asyncio.run(load(app, words, NUM_STREAMS + 8, num_requests))
    assert ends["left"] >= 10 and ends["left"] + ends["right"] == num_requests, ends
    app.check_sums()


def rank_names() -> list[str]:
    actors = ray.util.list_named_actors(all_namespaces=True)
    return sorted(
        actor["name"] for actor in actors if actor["namespace"] == SERVE_NAMESPACE and ":rank" in actor["name"]
    )


def bundle_of(name: str) -> tuple[str, int]:
    """Placement group and bundle that a rank lives in, by the resources that Ray has given it."""
    actor = ray.get_actor(name, namespace=SERVE_NAMESPACE)
    given = ray.get(
        actor.__ray_call__.remote(lambda self: list(ray._private.worker.global_worker.core_worker.resource_ids()))
    )
    found = {
        match.groups() for match in (re.fullmatch(r"CPU_group_(\d+)_(\w+)", resource) for resource in given) if match
    }
    assert len(found) == 1, given
    ((index, group),) = found
    return group, int(index)


def check_places(num_replicas: int) -> None:
    """REPLICA:rank0 in bundle 1 of the replica's group, REPLICA:rank1 in bundle 2; each with all of it."""
    names = rank_names()
    groups = {key: group for key, group in placement_group_table().items() if group["state"] == "CREATED"}
    assert len(groups) == num_replicas and len(names) == len(processes(RANK)) == 2 * num_replicas
    replicas = {name.rsplit(":", 1)[0] for name in names}
    assert names == sorted(f"{replica}:rank{rank}" for replica in replicas for rank in (0, 1))
    for replica in replicas:
        (group, first), (other, second) = (bundle_of(f"{replica}:rank{rank}") for rank in (0, 1))
        assert (group, first, second) == (other, 1, 2)
        assert groups[group]["bundles"] == {0: {"CPU": 0.1}, 1: {"CPU": 0.5}, 2: {"CPU": 0.5}}
        assert groups[group]["strategy"] == "STRICT_PACK"


def check_nothing_left() -> None:
    """Of an application that was deleted."""
    eventually(lambda: not rank_names() and not processes(RANK) and not processes(SCHEDULER), 15, "no process is left")
    eventually(lambda: held() == (ray.cluster_resources()["CPU"], 0), 15, lambda: f"all resources are free: {held()}")


def test_two_engines_of_two_ranks_on_one_host_give_the_answers_of_one_rank(
    cluster_url: str, folder: Path, wanted: list[dict[str, Any]]
) -> None:
    with deployed_ranks(cluster_url, folder, 2, scheduler_replicas=2) as app:
        check_places(num_replicas=2)
        check_same_answers(app, wanted)
        check_random_load(app, wanted)
    check_nothing_left()


def test_two_ranks_give_the_answers_of_one_at_depth_0(
    cluster_url: str, folder: Path, wanted: list[dict[str, Any]]
) -> None:
    with deployed_ranks(cluster_url, folder, 2, overlap_depth=0) as app:
        check_same_answers(app, wanted)
        check_random_load(app, wanted)


# -- what cannot be divided is said before anything starts

UNDIVIDED = "tensor_parallel_size is 2, which does not divide the 9 attention heads"


@pytest.mark.model
def test_config_check_says_which_number_two_ranks_do_not_divide(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("tensor_parallel_size: 2")
    assert overlap_serve(["config", "check", "--fetch", str(file)]) == 2
    shown = capsys.readouterr().err
    assert UNDIVIDED in shown and "possible are 1, 3;" in shown and len(shown.splitlines()) == 1


@pytest.mark.model
def test_a_deployment_that_does_not_divide_fails_at_once(cluster_url: str) -> None:
    """As with any other wrong field, Serve starts no replica; its status has the reason."""
    client = serve_api.serve_start()
    args = {"tensor_parallel_size": 2, "device": "cpu"}
    application = {"name": "odd", "route_prefix": "/odd", "import_path": "deployments.app:build", "args": args}
    client.deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}), _blocking=False)
    try:
        failed_s = eventually(lambda: status_of("odd").status == "DEPLOY_FAILED", 60, "Serve says that it failed")
        assert failed_s < 30
        assert UNDIVIDED in status_of("odd").message and "possible are 1, 3;" in status_of("odd").message
        assert not status_of("odd").deployments
    finally:
        serve.delete("odd")


def status_of(application: str) -> Any:
    return serve.status().applications[application]


# -- loading


def test_ranks_may_load_for_longer_than_rank_timeout(
    cluster_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.app.SchedulerReplica", LongLoadingScheduler)
    with deployed_ranks(cluster_url, folder, 2, rank_timeout=RANK_TIMEOUT_S) as app:
        names = rank_names()
        assert answers(app)
        assert rank_names() == names


def check_fails(app_args: dict[str, object], words: str) -> None:
    """The deployment's status has these words, and no process is left."""
    try:
        with pytest.raises(RuntimeError):
            serve.run(build(parse_config(app_args)), name=APP_NAME, route_prefix="/")
        assert words in status_of(APP_NAME).deployments["Scheduler"].message
    finally:
        serve.delete(APP_NAME)
    check_nothing_left()


def test_a_rank_without_memory_says_so_and_takes_the_other_with_it(
    cluster_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits for it at the store, for up to two hours."""
    monkeypatch.setattr("deployments.app.SchedulerReplica", LowMemoryScheduler)
    check_fails(torch_args(folder, 2), "MiB are free on cpu")


def test_a_broken_checkpoint_is_named_by_the_ranks(cluster_url: str, folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4000])
    check_fails(torch_args(tmp_path, 2), str(weights))


# -- a rank that is lost


@pytest.fixture(scope="module")
def app(cluster_url: str, folder: Path) -> Iterator[App]:
    with deployed_ranks(cluster_url, folder, 2, rank_timeout=RANK_TIMEOUT_S) as app:
        yield app


def rank_process(rank: int) -> psutil.Process:
    (name,) = [name for name in rank_names() if name.endswith(f":rank{rank}")]
    place = ray.get(ray.get_actor(name, namespace=SERVE_NAMESPACE).place.remote())
    return psutil.Process(place.pid)


def log_lines(words: str) -> list[str]:
    """Lines with these words that processes of this cluster have logged."""
    folder = Path(ray._private.worker._global_node.get_logs_dir_path())
    texts = (file.read_text(errors="replace") for file in folder.glob("worker-*.err"))
    return [line for text in texts for line in text.splitlines() if words in line]


def check_reason(replica: str, words: str) -> None:
    """In one line of the lost replica's log."""
    lines = log_lines(f"{replica}: ")
    reasons = [line for line in lines if "; exiting with" in line]
    assert len(reasons) == 1, lines
    print(f"FAULT log: {reasons[0]}")
    assert words in reasons[0]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
def test_a_lost_rank_gives_every_client_its_end_and_its_replica_is_replaced(app: App, fault: str, rank: int) -> None:
    app.wait_idle()
    before = held()
    ranks = [rank_process(number) for number in (0, 1)]
    replica = rank_names()[0].rsplit(":", 1)[0]
    with loaded(app) as load:
        begin_s = time.monotonic()
        ranks[rank].kill() if fault == "SIGKILL" else ranks[rank].suspend()
        ended = check_documented_ends(load, NOTICED_S[fault] + 10)
        recovered_s = eventually(lambda: answers(app), RECOVERY_S, "a new request is answered")
    ended_s = max(outcome.ended_s for outcome in ended)
    report(f"{fault} of rank {rank} of 2", begin_s, ended_s, ended_s - begin_s + recovered_s)
    assert ended_s - begin_s < NOTICED_S[fault]
    check_reason(replica, f"rank {rank}")
    assert not any(process.is_running() for process in ranks)
    app.wait_ready()
    eventually(lambda: held() == before, 15, f"resources are as before: {before}")
    check_places(num_replicas=1)
    app.check_sums()
    assert app.metrics()["overlap_requests_failed_total"] >= NUM_STREAMS + NUM_QUEUED
