"""Every overlay, with every choice of components, keeps all rules; and every kind of mistake is found by one of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.app import SCHEDULER
from tests.k8s.kustomize import render
from tests.k8s.rules import problems
from tests.k8s.schemas import NO_CRD, has_crd
from tests.k8s.test_kustomize import COMPONENTS, OVERLAYS, with_components
from tests.k8s.view import View

K8S = Path(__file__).parents[2] / "k8s"
needs_crd = pytest.mark.skipif(not has_crd(), reason=NO_CRD)


@cache
def rendered(overlay: str) -> tuple[Any, ...]:
    return tuple(render(K8S / "overlays" / overlay)) + tuple(
        yaml.safe_load_all((K8S / "components" / "monitoring" / "podmonitor.yaml").read_text())
    )


@pytest.mark.parametrize("components", COMPONENTS, ids="+".join)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_keeps_all_rules(overlay: str, components: tuple[str, ...], tmp_path: Path) -> None:
    """Without KubeRay's CRD this does not look at the RayService's schema; the next test says so."""
    assert problems(View(render(with_components(tmp_path, overlay, components)))) == []


@needs_crd
def test_kuberays_crd_was_there_to_check_against() -> None:
    assert has_crd()


def test_overlays_differ_where_they_should() -> None:
    views = {overlay: View(list(rendered(overlay))) for overlay in OVERLAYS}
    assert {overlay: [pod.gpus for pod in view.workers] for overlay, view in views.items()} == {
        "cpu": [0],
        "gpu": [0, 1],
        "gpu-tp2": [0, 2],
    }
    assert [view.config.tensor_parallel_size for view in views.values()] == [1, 1, 2]
    bundles = views["gpu-tp2"].deployments[SCHEDULER]._replica_config.placement_group_bundles
    assert [bundle.get("GPU", 0) for bundle in bundles] == [0, 1, 1]
    tags = {view.head.container["image"].rsplit("-", 1)[1] for view in views.values()}
    assert tags == {"cpu", "gpu"}


def test_no_key_and_no_password_is_in_the_manifests() -> None:
    text = "".join(file.read_text() for file in K8S.rglob("*.yaml"))
    assert "kind: Secret" not in text
    for overlay in OVERLAYS:
        config = View(list(rendered(overlay))).config
        assert (config.api_keys, config.admin_api_keys) == ((), ())


# -- seeded mistakes: what is changed in the overlay gpu-tp2, and the words that name it


class Seed:
    """Places of the rendered documents, to change them."""

    def __init__(self, documents: list[Any]) -> None:
        self.documents = documents
        self.spec = self.named("RayService", "overlap-serve")["spec"]
        self.cluster = self.spec["rayClusterConfig"]
        self.head = self.cluster["headGroupSpec"]["template"]["spec"]
        self.group = self.cluster["workerGroupSpecs"][1]
        self.workers = [group["template"]["spec"] for group in self.cluster["workerGroupSpecs"]]
        self.worker = self.workers[1]

    def named(self, kind: str, name: str) -> Any:
        return next(one for one in self.documents if (one["kind"], one["metadata"]["name"]) == (kind, name))

    def without(self, kind: str, name: str) -> None:
        self.documents.remove(self.named(kind, name))

    def edit_serve(self, change: Callable[[Any], object]) -> None:
        document = yaml.safe_load(self.spec["serveConfigV2"])
        change(document)
        self.spec["serveConfigV2"] = yaml.safe_dump(document)

    def edit_args(self, **fields: object) -> None:
        self.edit_serve(lambda document: document["applications"][0]["args"].update(fields))

    def edit_deployment(self, index: int, **fields: object) -> None:
        self.edit_serve(lambda document: document["applications"][0]["deployments"][index].update(fields))

    def env(self, spec: Any, name: str) -> Any:
        return next(item for item in spec["containers"][0]["env"] if item["name"] == name)

    def probe(self, kind: str) -> Any:
        return self.worker["containers"][0][kind]

    def rules(self, policy: str) -> Any:
        return self.named("NetworkPolicy", policy)["spec"]["ingress"]


CRD_SEEDS: dict[str, tuple[Callable[[Seed], object], str]] = {
    "unknown key": (
        lambda s: s.spec.update(rayClusterDeletionDelaySecond=1),
        "'rayClusterDeletionDelaySecond' was unexpected",
    ),
    "unknown key in a pod": (
        lambda s: s.worker.update(terminationGracePeriod=9),
        "'terminationGracePeriod' was unexpected",
    ),
    "wrong type": (lambda s: s.group.update(minReplicas="2"), "'2' is not of type 'integer'"),
    "wrong enum": (lambda s: s.cluster["authOptions"].update(mode="tokens"), "'tokens' is not one of"),
    "required key missing": (lambda s: s.group.pop("groupName"), "'groupName' is a required property"),
    "start parameter that is no text": (
        lambda s: s.cluster["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}),
        "0 is not of type 'string'",
    ),
}
SEEDS: dict[str, tuple[Callable[[Seed], object], str]] = {
    # schemas of Kubernetes and of Prometheus' operator
    "unknown key in a NetworkPolicy": (
        lambda s: s.named("NetworkPolicy", "overlap-serve")["spec"].update(policyType=["Ingress"]),
        "'policyType' was unexpected",
    ),
    "wrong type in a StatefulSet": (
        lambda s: s.named("StatefulSet", "overlap-serve-redis")["spec"].update(replicas="1"),
        "'1' is not of type 'integer'",
    ),
    "apiVersion that is gone": (
        lambda s: s.named("PodDisruptionBudget", "overlap-serve-cpu").update(apiVersion="policy/v1beta1"),
        "Couldn't find schema for kind PodDisruptionBudget",
    ),
    "unknown key in a PodMonitor": (
        lambda s: s.named("PodMonitor", "overlap-serve-ray")["spec"].update(endpoints=[]),
        "'endpoints' was unexpected",
    ),
    # the Serve configuration
    "unknown Serve key": (
        lambda s: s.edit_deployment(0, max_ongoing_request=3),
        "applications[0].deployments[0].max_ongoing_request: unknown key",
    ),
    "unknown key at the top": (lambda s: s.edit_serve(lambda d: d.update(http_option={})), "http_option: unknown key"),
    "wrong type in Serve's part": (
        lambda s: s.edit_deployment(2, num_replicas="many"), "`num_replicas` must be an int"
    ),
    "unknown field of ours": (lambda s: s.edit_args(modle="x"), "args: invalid configuration: modle: unknown field"),
    "wrong value of ours": (lambda s: s.edit_args(tensor_parallel_size=0), "tensor_parallel_size: Input should be"),
    "wrong deployment name": (lambda s: s.edit_deployment(1, name="Schedulers"), "deployment Schedulers does not exist"),
    "wrong import path": (
        lambda s: s.edit_serve(lambda d: d["applications"][0].update(import_path="deployments:build")),
        "import_path is deployments:build",
    ),
    "proxy on the head only": (
        lambda s: s.edit_serve(lambda d: d.update(proxy_location="HeadOnly")), "proxy_location must be EveryNode"
    ),
    "HTTP on localhost": (
        lambda s: s.edit_serve(lambda d: d["http_options"].update(host="127.0.0.1")), "http_options must be 0.0.0.0:8000"
    ),
    "open to everybody": (lambda s: s.edit_args(api_keys_file=None), "api_keys_file is not set"),
    # head and workers
    "switch differs": (
        lambda s: s.env(s.worker, "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S").update(value="1"),
        "group gpu: RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S is 1, on the head 30",
    ),
    "switch only on the head": (
        lambda s: s.worker["containers"][0]["env"].remove(s.env(s.worker, "RAY_SERVE_ENABLE_HA_PROXY")),
        "group gpu: RAY_SERVE_ENABLE_HA_PROXY is None",
    ),
    "switch off": (lambda s: s.env(s.head, "RAY_SERVE_THROUGHPUT_OPTIMIZED").update(value="0"), "head: RAY_SERVE_THROUGHPUT_OPTIMIZED"),
    "other image": (lambda s: s.worker["containers"][0].update(image="other:1"), "must run the same image"),
    "other Ray": (lambda s: s.cluster.update(rayVersion="2.59.0"), "rayVersion is 2.59.0"),
    # times
    "grace shorter than the drain": (
        lambda s: s.worker.update(terminationGracePeriodSeconds=60), "terminationGracePeriodSeconds 60 must be more than the drain"
    ),
    "no grace": (lambda s: s.worker.pop("terminationGracePeriodSeconds"), "terminationGracePeriodSeconds 30 must be more"),
    "drain longer than the pods wait": (lambda s: s.edit_args(drain_timeout=300.0), "must be more than the 315 s of a stopping replica"),
    "replica killed late": (
        lambda s: s.edit_deployment(0, graceful_shutdown_timeout_s=600), "must be more than the 600 s of a stopping replica"
    ),
    "old cluster removed early": (
        lambda s: s.spec.update(rayClusterDeletionDelaySeconds=60), "rayClusterDeletionDelaySeconds must be more than the 75 s"
    ),
    "no preStop": (lambda s: s.worker["containers"][0].pop("lifecycle"), "preStop does not drain the node"),
    "preStop that drains some node, perhaps the head": (
        lambda s: s.worker["containers"][0]["lifecycle"]["preStop"]["exec"].update(command=["ray", "drain-node"]),
        "preStop does not drain the node",
    ),
    # pods
    "no /dev/shm": (
        lambda s: s.worker["containers"][0]["volumeMounts"].pop(0), "group gpu: /dev/shm must be an emptyDir in Memory"
    ),
    "/dev/shm on disk": (lambda s: s.worker["volumes"][0].update(emptyDir={}), "group gpu: /dev/shm must be an emptyDir in Memory"),
    "/dev/shm takes the memory": (
        lambda s: s.worker["volumes"][0]["emptyDir"].update(sizeLimit="64Gi"), "/dev/shm of 64Gi counts as the pod's memory"
    ),
    "volume missing": (lambda s: s.worker["volumes"].pop(1), "volume models is mounted and not there"),
    "probe path wrong": (
        lambda s: s.probe("livenessProbe")["httpGet"].update(path="/healthz"), "livenessProbe asks port 52365 for /healthz"
    ),
    "probe port wrong": (
        lambda s: s.probe("startupProbe")["httpGet"].update(port=8265), "startupProbe asks port 8265 for /api/healthz"
    ),
    "readiness path wrong": (
        lambda s: s.probe("readinessProbe")["exec"].update(command=["wget", "http://localhost:8000/health"]),
        "readinessProbe asks port 8000 for /health,",
    ),
    "readiness without the proxy": (
        lambda s: s.worker["containers"][0].update(readinessProbe=s.probe("livenessProbe")), "readiness must ask Serve's proxy"
    ),
    "no liveness": (lambda s: s.worker["containers"][0].pop("livenessProbe"), "group gpu: no livenessProbe"),
    # room
    "GPUs do not fit the ranks": (
        lambda s: s.worker["containers"][0]["resources"]["limits"].update({"nvidia.com/gpu": "1"}),
        "1 nvidia.com/gpu, not a multiple of tensor_parallel_size 2",
    ),
    "ranks do not fit the GPUs": (lambda s: s.edit_args(tensor_parallel_size=4), "not a multiple of tensor_parallel_size 4"),
    "more engines than pods": (lambda s: s.group.update(maxReplicas=3), "up to 8 GPUs, the worker groups have at most 6"),
    "GPUs for nobody": (lambda s: s.edit_args(device="cpu"), "has 2 GPUs, and the configuration uses none"),
    "too few CPUs": (
        lambda s: [spec["containers"][0]["resources"]["requests"].update(cpu="500m") for spec in s.workers],
        "CPUs, the worker groups have at most",
    ),
    "group sizes": (lambda s: s.group.update(replicas=9), "minReplicas <= replicas <= maxReplicas does not hold"),
    "no autoscaler": (lambda s: s.cluster.update(enableInTreeAutoscaling=False), "enableInTreeAutoscaling must be true"),
    "unknown upgrade strategy": (lambda s: s.spec["upgradeStrategy"].update(type="Rolling"), "upgradeStrategy.type Rolling is none of"),
    "incremental upgrade without options": (
        lambda s: s.spec["upgradeStrategy"].update(type="NewClusterWithIncrementalUpgrade"), "which needs them"
    ),
    "step above surge": (
        lambda s: s.spec.update(
            upgradeStrategy={
                "type": "NewClusterWithIncrementalUpgrade",
                "clusterUpgradeOptions": {
                    "gatewayClassName": "x", "stepSizePercent": 60, "intervalSeconds": 1, "maxSurgePercent": 50
                },
            }
        ),
        "stepSizePercent <= maxSurgePercent",
    ),
    # network
    "zmq open to the outside": (lambda s: s.rules("overlap-serve")[1].pop("ports"), "a pod of another application reaches port 45678"),
    "zmq open to an address": (
        lambda s: s.rules("overlap-serve").append({"from": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]}),
        "an address outside reaches port 45678",
    ),
    "rule without a source": (
        lambda s: s.rules("overlap-serve").append({"ports": [{"port": 30000, "endPort": 31000}]}),
        "an address outside reaches port 30001",
    ),
    "policy for nobody": (
        lambda s: s.named("NetworkPolicy", "overlap-serve")["spec"].update(podSelector={"matchLabels": {"app": "x"}}),
        "an address outside reaches port 6379",
    ),
    "no policy": (lambda s: s.without("NetworkPolicy", "overlap-serve"), "an address outside reaches port"),
    "zmq shut inside": (
        lambda s: s.rules("overlap-serve")[0].update(ports=[{"protocol": "TCP", "port": 6379}]),
        "a pod of the server must reach port 45678",
    ),
    "no way for the operator": (lambda s: s.rules("overlap-serve").pop(2), "KubeRay's operator must reach port 8265"),
    "no way for Prometheus": (lambda s: s.rules("overlap-serve").pop(3), "Prometheus must reach port 8080"),
    "Redis open": (lambda s: s.without("NetworkPolicy", "overlap-serve-redis"), "reaches Redis"),
    # budgets
    "budget for nobody": (
        lambda s: s.named("PodDisruptionBudget", "overlap-serve-gpu")["spec"]["selector"]["matchLabels"].update({"ray.io/group": "gpus"}),
        "PodDisruptionBudget overlap-serve-gpu: its selector matches no pod",
    ),
    "budget that blocks for ever": (
        lambda s: s.named("PodDisruptionBudget", "overlap-serve-gpu")["spec"].update(minAvailable=2), "no node could be drained, ever"
    ),
    "budget in percent": (
        lambda s: s.named("PodDisruptionBudget", "overlap-serve-gpu")["spec"].update(minAvailable="50%"), "takes only a number"
    ),
    "no budget": (lambda s: s.without("PodDisruptionBudget", "overlap-serve-gpu"), "group gpu: no PodDisruptionBudget"),
    # references
    "secret that nobody defines": (
        lambda s: s.env(s.worker, "HF_TOKEN").update(valueFrom={"secretKeyRef": {"name": "hf", "key": "token"}}),
        "Secret hf is used and defined nowhere",
    ),
    "key that the secret lacks": (
        lambda s: s.cluster["gcsFaultToleranceOptions"]["redisPassword"]["valueFrom"]["secretKeyRef"].update(key="pass"),
        "Secret overlap-serve-redis has no key pass",
    ),
    "claim that nobody makes": (
        lambda s: s.without("PersistentVolumeClaim", "overlap-serve-models"),
        "PersistentVolumeClaim overlap-serve-models is used and defined nowhere",
    ),
    "key file elsewhere": (
        lambda s: s.edit_args(api_keys_file="/etc/keys/api-keys"), "group gpu: api_keys_file: nothing is mounted at /etc/keys"
    ),
    "key file by another name": (
        lambda s: s.edit_args(api_keys_file="/etc/overlap-serve/keys/apikeys"), "apikeys is no key of the Secret overlap-serve-keys"
    ),
    "no token": (lambda s: s.cluster.pop("authOptions"), "authOptions.mode must be token"),
    "no fault tolerance": (lambda s: s.cluster.pop("gcsFaultToleranceOptions"), "the end of the head is the end of the cluster"),
    "Redis elsewhere": (
        lambda s: s.cluster["gcsFaultToleranceOptions"].update(redisAddress="redis:6379"), "redisAddress redis:6379 is no Service"
    ),
    "monitor of a port that is not there": (
        lambda s: s.named("PodMonitor", "overlap-serve-ray")["spec"]["podMetricsEndpoints"][0].update(port="metric"),
        "no pod has a port metric",
    ),
    "everything counted once per pod": (
        lambda s: s.named("PodMonitor", "overlap-serve-application")["spec"]["selector"]["matchLabels"].pop("ray.io/node-type"),
        "ask one pod, not each",
    ),
}  # fmt: skip


def seeded(change: Callable[[Seed], object]) -> list[str]:
    documents = copy.deepcopy(list(rendered("gpu-tp2")))
    change(Seed(documents))
    return problems(View(documents))


@pytest.mark.parametrize("name", SEEDS)
def test_a_mistake_is_found(name: str) -> None:
    change, words = SEEDS[name]
    found = seeded(change)
    assert any(words in problem for problem in found), found


@needs_crd
@pytest.mark.parametrize("name", CRD_SEEDS)
def test_a_mistake_in_the_rayservice_is_found(name: str) -> None:
    change, words = CRD_SEEDS[name]
    found = seeded(change)
    assert any(words in problem for problem in found), found


def test_without_a_mistake_nothing_is_found() -> None:
    assert seeded(lambda seed: None) == []
