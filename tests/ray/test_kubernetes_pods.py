"""The overlay `cpu` of k8s/ without Kubernetes: its Serve configuration, its environment, its probes and its preStop hook, on a Ray cluster
whose nodes have an address each and ask for a token, as KubeRay's pods do. Only the engine is the fake one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.k8s.kustomize import render
from tests.k8s.view import Pod, View
from tests.ray.commands import START_TIMEOUT_S, environment, tool
from tests.ray.conftest import ROOT, eventually, fake_args
from tests.ray.nodes import Cluster, Node, NoNetwork, cluster

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

KEY = "sk-test"
TOKEN = "0123456789abcdef0123456789abcdef"  # as KubeRay makes one
HOOK_TIMEOUT_S = 150.0  # terminationGracePeriodSeconds
NUM_TOKENS = 800
HAPROXY_FILES = {
    "CONFIG_FILE_LOC": "haproxy.cfg",
    "SOCKET_PATH": "admin.sock",
    "SERVER_STATE_BASE": "",
    "SERVER_STATE_FILE": "server-state",
    "METRICS_SOCKET_PATH": "metrics.sock",
}
VIEW = View(render(ROOT / "k8s" / "overlays" / "cpu"))
[WORKER] = VIEW.workers


class Pods:
    """A head and two workers of the group `cpu`, with the application on them."""

    def __init__(self, nodes: Cluster, folder: Path, env: dict[str, str]) -> None:
        self._nodes = nodes
        self._env = env
        self._folder = folder
        self.address = self._start(0).address
        self.http = httpx.Client(
            base_url=f"http://{self.address}:8000", timeout=60, headers={"Authorization": f"Bearer {KEY}"}
        )
        self._dashboard = httpx.Client(
            base_url=f"http://{self.address}:8265", timeout=10, headers={"Authorization": f"Bearer {TOKEN}"}
        )
        eventually(lambda: len(self.alive()) == 1, START_TIMEOUT_S, "the head is up")
        self.workers: list[Node] = []
        for number in (2, 3):  # one after the other: a node that starts on a busy machine gives up after a while
            self.workers.append(self._start(int(WORKER.amount("cpu"))))
            eventually(lambda: len(self.alive()) == number, START_TIMEOUT_S, "the worker has joined")  # noqa: B023

    def _start(self, num_cpus: int) -> Node:
        """Pods have a /tmp each; here the nodes share one, where every HAProxy would write the same files."""
        folder = self._folder / f"haproxy-{len(self._nodes.nodes)}"
        self._env.update({f"RAY_SERVE_HAPROXY_{name}": str(folder / file) for name, file in HAPROXY_FILES.items()})
        return self._nodes.start(num_cpus=num_cpus)

    def deploy(self) -> None:
        file = self._folder / "serve_config.yaml"
        file.write_text(yaml.safe_dump(self._config()))
        command = [tool("serve"), "deploy", str(file), "--address", str(self._dashboard.base_url)]
        done = subprocess.run(command, env=self._env, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr.decode()
        eventually(lambda: self.status("/health/ready") == 200, START_TIMEOUT_S, "the application is ready")

    def _config(self) -> dict[str, Any]:
        """The overlay's, with the fake engine and a key file on this machine."""
        (self._folder / "api-keys").write_text(f"{KEY}\n")
        (self._folder / "admin-api-keys").write_text("sk-admin\n")
        document: dict[str, Any] = VIEW.serve
        args = document["applications"][0]["args"]
        files = {name: str(self._folder / Path(args[name]).name) for name in ("api_keys_file", "admin_api_keys_file")}
        kept = {name: args[name] for name in ("model", "device", "scheduler_replicas", "drain_timeout")}
        document["applications"][0]["args"] = {**fake_args(), **kept, **files}
        return document

    def status(self, path: str, **options: Any) -> int:
        try:
            return self.http.get(path, **options).status_code
        except httpx.TransportError:
            return 0

    def alive(self) -> list[str]:
        """Addresses of the nodes that Ray counts as alive."""
        try:
            answer = self._dashboard.get("/api/v0/nodes")
        except httpx.TransportError:
            return []
        rows = answer.json()["data"]["result"]["result"] if answer.is_success else []
        return [row["node_ip"] for row in rows if row["state"] == "ALIVE"]

    def replicas(self, deployment: str) -> list[str]:
        """Addresses of the nodes with a running replica."""
        applications: Any = self._dashboard.get("/api/serve/applications/").json()["applications"]
        rows = applications["overlap"]["deployments"][deployment]["replicas"]
        return [row["node_ip"] for row in rows if row["state"] == "RUNNING"]

    def run(self, node: Node, command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        """As the kubelet runs a hook or a probe in the container. KubeRay gives every pod the head's address."""
        env = {**self._env, "RAY_ADDRESS": f"{self.address}:6379"}
        return subprocess.run(
            ["ip", "netns", "exec", node.namespace, *command],
            env=env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def stream(self) -> tuple[int, str]:
        """(chunks with text, last finish_reason) of one long answer."""
        body = {
            "model": VIEW.config.model_name,
            "prompt": "hello",
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        with self.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            lines = [line for line in response.iter_lines() if line.startswith("data: ")]
        assert lines.pop() == "data: [DONE]"
        return len(lines), lines[-1]

    def close(self) -> None:
        self.http.close()
        self._dashboard.close()


def pod_environment(pod: Pod) -> dict[str, str]:
    """What the manifest sets, and the token of KubeRay."""
    given = {item["name"]: item["value"] for item in pod.container["env"] if item["name"].startswith("RAY_SERVE_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # hooks and probes call `python`
    return {**given, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "PATH": path}


@pytest.fixture(scope="module")
def pods() -> Iterator[Pods]:
    # Short: Ray puts sockets there, whose paths may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="ovk-", ignore_cleanup_errors=True) as folder:
        env = environment(Path(folder), **pod_environment(WORKER))
        del env["RAY_ADDRESS"], env["RAY_TMPDIR"]
        try:
            with cluster(Path(folder), env) as nodes:
                pods = Pods(nodes, Path(folder), env)
                pods.deploy()
                yield pods
                pods.close()
        except NoNetwork as reason:
            pytest.skip(str(reason))


def test_keys_come_from_the_file_and_the_token_guards_the_dashboard(pods: Pods) -> None:
    assert pods.status("/v1/models") == 200
    assert httpx.get(f"http://{pods.address}:8000/v1/models", timeout=10).status_code == 401
    assert httpx.get(f"http://{pods.address}:8265/api/serve/applications/", timeout=10).status_code in (401, 403)


def test_probes_succeed_without_a_token(pods: Pods) -> None:
    liveness = WORKER.container["livenessProbe"]["httpGet"]
    readiness = WORKER.container["readinessProbe"]["exec"]["command"]
    for node in pods.workers:
        url = f"http://{node.address}:{liveness['port']}{liveness['path']}"
        assert httpx.get(url, timeout=10).status_code == 200
    for node in pods.workers:
        eventually(lambda: pods.run(node, readiness, 20).returncode == 0, 30, "the worker is ready")  # noqa: B023


def test_a_leaving_pod_is_replaced_elsewhere_and_its_stream_ends_well(pods: Pods) -> None:
    [engine] = pods.replicas("Scheduler")
    [leaving] = [node for node in pods.workers if node.address == engine]
    hook = WORKER.container["lifecycle"]["preStop"]["exec"]["command"]
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(pods.stream)
        begin = time.monotonic()
        done = pods.run(leaving, hook, HOOK_TIMEOUT_S)
        took_s = time.monotonic() - begin
        chunks, last = answer.result()
    assert (done.returncode, done.stderr) == (0, "")
    leaving.lose_power()  # then the kubelet ends what is left
    print(f"leaving pod: the hook took {took_s:.1f} s; a stream of {chunks} chunks ended well")
    assert '"length"' in last
    eventually(lambda: pods.status("/health/ready") == 200, 30, "the others serve on")
    assert set(pods.replicas("Scheduler")) == {node.address for node in pods.workers} - {engine}
