"""One private Ray cluster for the whole session, configured as serve_config.yaml configures one, and applications on it.

`ray.init(address="local")` and a temporary folder of its own: other clusters on the machine are neither joined nor stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import psutil
import pytest
import ray
import yaml
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from deployments.app import build
from overlap_serve.config import HostFacts, ServeConfig, fake_facts, parse_config, resolve

ROOT = Path(__file__).parents[2]
APP_NAME = "test"
READY_TIMEOUT_S = 120.0


def free_port() -> int:
    """Outside the range from which systems take ports for connections: until this one is used, Ray opens dozens of those."""
    for port in random.sample(range(20_000, 30_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("0.0.0.0", port))
            return port
    pytest.fail("no free port between 20000 and 30000")


def serve_env() -> dict[str, str]:
    """The environment that serve_config.yaml gives to Serve, with HAProxy's own ports moved out of other clusters' way."""
    document = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    env: dict[str, str] = dict(document["controller_options"]["runtime_env"]["env_vars"])
    env |= {f"RAY_SERVE_HAPROXY_{name}_PORT": str(free_port()) for name in ("METRICS", "STATS")}
    return env


def python_path() -> str:
    """For workers: this checkout, and what this process was given."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


def eventually(holds: Callable[[], bool], timeout_s: float, what: str | Callable[[], str]) -> float:
    """Seconds until it holds; fails the test when it never does. For conditions in other processes, which send no event."""
    begin = time.monotonic()
    while time.monotonic() - begin < timeout_s:
        if holds():
            return time.monotonic() - begin
        time.sleep(0.02)
    pytest.fail(f"not within {timeout_s} s: {what if isinstance(what, str) else what()}")


class App:
    """A deployed application, as its users and its administrator see it."""

    def __init__(self, url: str, config: ServeConfig) -> None:
        self.url = url
        self.config = config
        self.http = httpx.Client(base_url=url, timeout=60)
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        self.model = config.model_name
        host = HostFacts(num_cpus=2, bf16=False, cuda=False)
        # Of the fake engine, whose pages are a matter of configuration alone.
        self.num_pages = (
            resolve(config, fake_facts(config.fake), host, "").num_pages * config.scheduler_replicas
            if config.engine == "fake"
            else 0
        )

    def health(self) -> dict[str, object]:
        body: dict[str, object] = self.http.get("/health").json()
        return body

    def metrics(self) -> dict[str, float]:
        """Sums over all processes and labels, by sample name."""
        sums: dict[str, float] = {}
        for name, _, value in self.samples():
            sums[name] = sums.get(name, 0.0) + value
        return sums

    def samples(self) -> list[tuple[str, dict[str, str], float]]:
        """(name, labels, value) of all processes."""
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        return [(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]

    def check_sums(self) -> None:
        """At rest, within the second for which one exposition is reused: every request is counted once, and so is every page."""
        self.wait_idle()
        eventually(lambda: not self.wrong_sums(), 10, lambda: f"the sums of /metrics are right: {self.wrong_sums()}")

    def wrong_sums(self) -> dict[str, object]:
        """What http-api section 12 promises at rest and does not hold, with its parts."""
        samples = self.samples()

        def total(name: str, **labels: str) -> float:
            return sum(value for n, of, value in samples if n == f"overlap_{name}" and labels.items() <= of.items())

        ends = {end: total(f"requests_{end}_total") for end in ("finished", "aborted", "failed")}
        open_ = {name: total(name) for name in ("open_requests", "running_requests", "detokenizer_open_streams")}
        pages = {state: total("kv_pages", state=state) for state in ("free", "cached", "owned")}
        wrong: dict[str, object] = {name: value for name, value in open_.items() if value}
        if total("requests_accepted_total") != sum(ends.values()):
            wrong["requests"] = (total("requests_accepted_total"), ends)
        if pages["owned"] or sum(pages.values()) != self.num_pages:
            wrong["pages"] = (self.num_pages, pages)
        return wrong

    def completion(self, **body: object) -> dict[str, object]:
        return {"model": self.model, "prompt": "hello", "temperature": 0, "ignore_eos": True, **body}

    def wait_idle(self, timeout_s: float = 5.0) -> float:
        """Seconds until no scheduler runs or queues anything."""
        return eventually(
            lambda: self.health()["running"] == self.health()["waiting"] == 0, timeout_s, "schedulers are idle"
        )

    def wait_ready(self) -> None:
        def ready() -> bool:
            try:
                answer = self.http.get("/health")
            except httpx.TransportError:
                return False
            return answer.status_code == 200 and len(answer.json()["replicas"]) >= self.config.scheduler_replicas

        eventually(ready, READY_TIMEOUT_S, "the application is ready")

    def close(self) -> None:
        self.http.close()
        self.openai.close()


@pytest.fixture(scope="session")
def cluster_url() -> Iterator[str]:
    """A running private cluster with Serve; yields where its HTTP is."""
    # Not pytest's folder: Ray puts sockets there, whose paths may have 107 characters.
    folder = tempfile.mkdtemp(prefix="overlap-ray-")
    port = free_port()
    ray.init(
        address="local",
        num_cpus=16,
        include_dashboard=False,
        object_store_memory=80 * 1024 * 1024,
        _temp_dir=folder,
        log_to_driver=False,
        runtime_env={"env_vars": serve_env() | {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": python_path()}},
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """RAY_TMPDIR; short, because Ray puts sockets there."""
    folder = Path(tempfile.mkdtemp(prefix="overlap-cli-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def deployed(url: str, **args: object) -> Iterator[App]:
    """An application from `args` of a serve_config.yaml, deleted at the end."""
    app = App(url, parse_config(args))
    try:
        serve.run(build(app.config), name=APP_NAME, route_prefix="/")
        app.wait_ready()
        yield app
    finally:
        serve.delete(APP_NAME)  # first: the client may still read
        app.close()


def fake_args(**args: object) -> dict[str, object]:
    """`args` for the fake engine: 10 ms a token, capacity for everything that tests ask."""
    return {"engine": "fake", "fake": {"base_ms": 10.0}, "drain_timeout": 20.0, **args}


def completion_call(body: dict[str, object]) -> bytes:
    """POST /v1/completions as bytes on the wire."""
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def send_without_reading(app: App, body: dict[str, object]) -> socket.socket:
    """A completion on a bare connection, whose answer nobody awaits."""
    address = urlsplit(app.url)
    assert address.port is not None
    connection = socket.create_connection((address.hostname, address.port))
    connection.sendall(completion_call(body))
    return connection


def processes(title: str) -> list[psutil.Process]:
    """Ray worker processes of this session's cluster by the start of their title, such as "ray::RankActor"."""
    return [
        process
        for process in psutil.Process(os.getpid()).children(recursive=True)
        if title_of(process).startswith(title)
    ]


def title_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # gone meanwhile
        return ""
