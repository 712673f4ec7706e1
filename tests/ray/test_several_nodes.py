"""Scheduler, detokenizer and ingress on a node each: who connects to whom, and what clients get when a node goes away.

A private cluster of a head that runs nothing of ours and three nodes with an address each (`tests.ray.nodes`), deployed with `serve deploy`
from a YAML that places the deployments. Prints times for docs/operations.md, as test_faults.py does.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from overlap_serve.config import parse_config
from tests.ray.commands import START_TIMEOUT_S, environment, tool
from tests.ray.conftest import ROOT, App, eventually, fake_args
from tests.ray.nodes import Cluster, Node, NoNetwork, cluster, ip
from tests.ray.test_faults import NUM_STREAMS, check_documented_ends, loaded, report

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

APPLICATION = "overlap"
ROLES = {"engine": "Scheduler", "text": "Detokenizer", "http": "Ingress"}
JOIN_TIMEOUT_S = 60.0
END_S = 15.0
SILENT_END_S = 60.0
RECOVERY_S = 90.0
PROBE_S = 2.0
# Ray gives a silent node up after about 20 s instead of 65 s; of the head's environment, see docs/operations.md.
HEALTH_CHECKS = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "5",
}


class Site:
    """The cluster with the application on it."""

    def __init__(self, nodes: Cluster, folder: Path, env: dict[str, str]) -> None:
        self._cluster = nodes
        self._env = env
        self._folder = folder
        nodes.start(num_cpus=0)
        self._dashboard = httpx.Client(base_url=f"http://{nodes.head.address}:8265", timeout=10)
        self.app = App(f"http://{nodes.head.address}:8000", parse_config(app_args()))
        self.by_role: dict[str, Node] = {}

    def start_node(self, role: str) -> Node:
        """A node for one part of the application. Returns before it has joined."""
        return self._cluster.start("--labels", f"role={role}", num_cpus=1)

    def wait_joined(self, node: Node) -> None:
        def joined() -> bool:
            return any(n["node_ip"] == node.address and n["state"] == "ALIVE" for n in self._state("nodes") or [])

        eventually(joined, JOIN_TIMEOUT_S, f"{node.address} has joined")

    def remove(self, node: Node) -> None:
        node.remove()
        self._cluster.nodes.remove(node)

    def deploy(self) -> None:
        """A node for each part, and the application on them; returns when it answers."""
        eventually(lambda: self._state("nodes") is not None, START_TIMEOUT_S, "the head is up")
        self.by_role = {role: self.start_node(role) for role in ROLES}
        file = self._folder / "serve_config.yaml"
        file.write_text(yaml.safe_dump(placed_config()))
        command = [tool("serve"), "deploy", str(file), "--address", str(self._dashboard.base_url)]
        done = subprocess.run(command, env=self._env, capture_output=True, timeout=START_TIMEOUT_S)
        assert done.returncode == 0, done.stderr.decode()
        self.app.wait_ready()

    def replicas(self) -> dict[str, list[str]]:
        """Addresses of the nodes with a running replica, by deployment."""
        applications: Any = self._dashboard.get("/api/serve/applications/").json()["applications"]
        return {
            name: [replica["node_ip"] for replica in deployment["replicas"] if replica["state"] == "RUNNING"]
            for name, deployment in applications[APPLICATION]["deployments"].items()
        }

    def expected(self) -> dict[str, list[str]]:
        return {ROLES[role]: [node.address] for role, node in self.by_role.items()}

    def num_groups(self) -> int:
        """Placement groups that hold resources."""
        return sum(group["state"] != "REMOVED" for group in self._state("placement_groups") or [])

    def close(self) -> None:
        self.app.close()
        self._dashboard.close()

    def _state(self, kind: str) -> list[dict[str, Any]] | None:
        """What Ray's state API lists; None while it is not up."""
        try:
            answer = self._dashboard.get(f"/api/v0/{kind}")
        except httpx.TransportError:
            return None
        rows: list[dict[str, Any]] | None = answer.json()["data"]["result"]["result"] if answer.is_success else None
        return rows


def app_args() -> dict[str, object]:
    return fake_args(max_running_requests=NUM_STREAMS)


def placed_config() -> dict[str, Any]:
    """serve_config.yaml with the fake engine, and each deployment on nodes of its role, as docs/operations.md says it."""
    document: dict[str, Any] = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    document["http_options"]["host"] = "0.0.0.0"
    document["applications"][0] |= {
        "args": app_args(),
        "deployments": [
            {
                "name": "Scheduler",
                "placement_group_bundles": [{"CPU": 0.1}, {"CPU": 0.5}],
                "placement_group_bundle_label_selector": [{"role": "engine"}],
            },
            {"name": "Detokenizer", "ray_actor_options": {"num_cpus": 0.1, "label_selector": {"role": "text"}}},
            {"name": "Ingress", "ray_actor_options": {"num_cpus": 0.1, "label_selector": {"role": "http"}}},
        ],
    }
    return document


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    # Short: Ray puts sockets there, whose paths may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="ovn-", ignore_cleanup_errors=True) as folder:
        env = environment(Path(folder), RAY_AUTH_MODE="disabled", **HEALTH_CHECKS)
        del env["RAY_ADDRESS"], env["RAY_TMPDIR"]
        try:
            with cluster(Path(folder), env) as nodes:
                site = Site(nodes, Path(folder), env)
                with closing(site):
                    site.deploy()
                    yield site
        except NoNetwork as reason:
            pytest.skip(str(reason))


def inboxes(node: Node) -> set[str]:
    """What replicas and ranks of this node listen on at the node's own address: zmq inboxes; Ray and HTTP listen on all addresses."""
    lines = [line.split() for line in ip("netns", "exec", node.namespace, "ss", "-Htlnp").splitlines()]
    ours = ("ray::ServeRepli", "ray::RankActor")
    return {fields[3] for fields in lines if fields[-1].startswith(tuple(f'users:(("{name}' for name in ours))} - {
        fields[3] for fields in lines if fields[3].startswith(("*:", "0.0.0.0:"))
    }


def senders(node: Node) -> Counter[str]:
    """Connections into this node's inboxes, by the address that they come from."""
    here = inboxes(node)
    lines = [line.split() for line in ip("netns", "exec", node.namespace, "ss", "-Htn").splitlines()]
    return Counter(fields[4].rsplit(":", 1)[0] for fields in lines if fields[3] in here)


def test_each_part_is_on_the_node_that_the_yaml_chose(site: Site) -> None:
    assert site.replicas() == site.expected()


def test_inboxes_are_at_the_nodes_addresses_and_tokens_go_straight_from_node_to_node(site: Site) -> None:
    engine, text, http = (site.by_role[role] for role in ROLES)
    site.app.http.post("/v1/completions", json=site.app.completion(max_tokens=4)).raise_for_status()
    for node, number in ((engine, 2), (text, 1), (http, 1)):  # control plane and rank; detokenizer; ingress
        assert [endpoint.rsplit(":", 1)[0] for endpoint in inboxes(node)] == [node.address] * number
    assert senders(text).keys() == {engine.address, http.address}  # tokens, announcements
    assert senders(http).keys() == {text.address}


def test_streams_and_whole_answers_are_the_same_text(site: Site) -> None:
    app = site.app

    def ask(i: int) -> bool:
        body = {"model": app.model, "prompt": f"request {i}", "max_tokens": 40, "temperature": 0}
        whole = app.openai.completions.create(**body)  # type: ignore[call-overload]
        chunks = app.openai.completions.create(**body, stream=True)  # type: ignore[call-overload]
        text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
        return len(text) > 0 and text == whole.choices[0].text

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(16)))


def test_a_client_that_leaves_frees_the_engine_on_the_other_node(site: Site) -> None:
    """The abort goes from the ingress to the rank's inbox, over the network."""
    app = site.app
    with app.http.stream("POST", "/v1/completions", json=app.completion(max_tokens=4000, stream=True)) as answer:
        next(answer.iter_lines())
    assert app.wait_idle() < 3
    assert site.by_role["http"].address in senders(site.by_role["engine"])


def answers(app: App) -> bool:
    try:
        return app.http.post("/v1/completions", json=app.completion(max_tokens=4), timeout=PROBE_S).status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def replaced(site: Site, role: str) -> Iterator[Node]:
    """The node of a role, to be taken away inside; a spare one stands by, and has taken over at the end."""
    site.app.wait_idle()
    lost, spare = site.by_role[role], site.start_node(role)
    site.wait_joined(spare)
    begin_s = time.monotonic()
    yield lost
    site.by_role[role] = spare
    eventually(lambda: site.replicas() == site.expected(), RECOVERY_S, f"replicas are at {site.expected()}")
    eventually(lambda: site.num_groups() == 1, 15, "the lost node's placement group is gone")
    site.app.wait_ready()
    site.app.check_sums()
    print(f"FAULT replaced on the spare node, all is free, after {time.monotonic() - begin_s:.1f} s")
    site.remove(lost)


@pytest.mark.parametrize("role", ["engine", "text"])
def test_a_node_that_dies_under_load_gives_every_client_its_end_and_is_replaced(site: Site, role: str) -> None:
    with replaced(site, role) as lost, loaded(site.app) as load:
        begin_s = time.monotonic()
        lost.lose_power()
        ended = check_documented_ends(load, END_S)
        eventually(lambda: answers(site.app), RECOVERY_S, "a new request is answered")
        report(f"{role} node without power", begin_s, max(o.ended_s for o in ended), time.monotonic() - begin_s)


def test_an_ingress_node_that_dies_cuts_its_clients_and_is_replaced(site: Site) -> None:
    with replaced(site, "http") as lost, loaded(site.app) as load:
        begin_s = time.monotonic()
        lost.lose_power()
        ended = [future.result(END_S) for future in (*load.streams, *load.queued)]
        eventually(lambda: answers(site.app), RECOVERY_S, "a new request is answered")
        report("http node without power", begin_s, max(o.ended_s for o in ended), time.monotonic() - begin_s)
    assert all(outcome.cut and not outcome.done for outcome in ended[:NUM_STREAMS])
    assert all(outcome.cut or outcome.status >= 500 for outcome in ended[NUM_STREAMS:])


def test_an_engine_node_that_falls_silent_gives_every_client_its_end_and_is_replaced(site: Site) -> None:
    """No connection is closed: nothing fails by itself until Ray gives the node up, and open Serve calls not even then."""
    with replaced(site, "engine") as lost, loaded(site.app) as load:
        begin_s = time.monotonic()
        lost.pull_cable()
        ended = check_documented_ends(load, SILENT_END_S)
        eventually(lambda: answers(site.app), RECOVERY_S, "a new request is answered")
        report("engine node without cable", begin_s, max(o.ended_s for o in ended), time.monotonic() - begin_s)
