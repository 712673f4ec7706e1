"""What must be true of the manifests beyond their schemas: each rule yields one line for each thing that is wrong.

They know Kubernetes, KubeRay and Ray only as far as the manifests use them; what they cannot read is a problem too, not an exception.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from ray.dashboard.modules.reporter import healthz_agent
from ray.serve._private import haproxy
from ray.serve.schema import ServeDeploySchema

from deployments.app import SCHEDULER
from deployments.leave import MARGIN_S
from overlap_serve.config import parse_config
from overlap_serve.errors import ConfigError
from tests.k8s.network import Source, allowed, matches
from tests.k8s.schemas import schema_problems
from tests.k8s.view import DEPLOYMENTS, GPU, Pod, View, quantity

README = Path(__file__).parents[2] / "k8s" / "README.md"
AGENT_PORT = 52365  # Ray's agent on each node
SERVE_PORT = 8000
SWITCHES = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}

OUTSIDE = Source("an address outside", address="203.0.113.7")
STRANGER = Source("a pod of another application", {"app": "other"})
OPERATOR = Source("KubeRay's operator", {"app.kubernetes.io/name": "kuberay-operator"})
PROMETHEUS = Source("Prometheus", {"app.kubernetes.io/name": "prometheus"})
# GCS, raylets' and workers' ports, zmq and torch.distributed (any), replicas behind HAProxy, agent, dashboard, metrics.
INNER_PORTS = (6379, 10002, 23456, 30001, 45678, AGENT_PORT, 8265, 8080)


def problems(view: View) -> list[str]:
    """Schemas first; the other rules need what they promise."""
    found = [problem for document in view.documents for problem in schema_problems(document)]
    for rule in (*EARLY, *LATE):
        if found and rule in LATE:
            break
        found += rule(view)
    return found


# -- the Serve configuration


def serve_document(view: View) -> Iterator[str]:
    try:
        ServeDeploySchema.model_validate(view.serve)
    except ValidationError as error:
        yield from (f"serveConfigV2: {item['loc']}: {item['msg']}" for item in error.errors(include_url=False))
        return
    yield from (f"serveConfigV2: {key}: unknown key" for key in unknown_keys(view.serve, ServeDeploySchema))
    if view.application["import_path"] != "deployments.app:build":
        yield f"serveConfigV2: import_path is {view.application['import_path']}"
    try:
        parse_config(view.application["args"])
    except ConfigError as error:
        yield f"serveConfigV2: args: {error}"


def deployment_names(view: View) -> Iterator[str]:
    for entry in view.application.get("deployments", []):
        if entry["name"] not in DEPLOYMENTS:
            yield f"serveConfigV2: deployment {entry['name']} does not exist; there are {', '.join(sorted(DEPLOYMENTS))}"


def proxies_where_probes_ask_for_them(view: View) -> Iterator[str]:
    if view.serve.get("proxy_location") != "EveryNode":
        yield "serveConfigV2: proxy_location must be EveryNode: the workers' readiness asks the proxy of their own node"
    http = view.serve.get("http_options", {})
    if http.get("host") != "0.0.0.0" or http.get("port") != SERVE_PORT:
        yield f"serveConfigV2: http_options must be 0.0.0.0:{SERVE_PORT}, where KubeRay's Service looks"


def unknown_keys(value: object, model: type[BaseModel], path: str = "") -> Iterator[str]:
    """Keys of a document that the pydantic model, or a model nested in it, does not have. Serve itself ignores them."""
    if not isinstance(value, dict):
        return
    for key, item in value.items():
        field = model.model_fields.get(key)
        if field is None:
            yield f"{path}{key}"
            continue
        for nested in nested_models(field.annotation):
            for index, element in enumerate(item if isinstance(item, list) else [item]):
                inner = f"{path}{key}[{index}]." if isinstance(item, list) else f"{path}{key}."
                yield from unknown_keys(element, nested, inner)


def nested_models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in getattr(annotation, "__args__", ()) for model in nested_models(argument)]


# -- head and workers


def equal_environment(view: View) -> Iterator[str]:
    """Serve's controller (head) and its replicas (workers) both read the switches."""
    head = switches(view.head)
    for name, value in SWITCHES.items():
        if head.get(name) != value:
            yield f"head: {name} is {head.get(name)}, not {value}"
    for pod in view.workers:
        for name in sorted(head.keys() | switches(pod).keys()):
            if head.get(name) != switches(pod).get(name):
                yield f"{pod.name}: {name} is {switches(pod).get(name)}, on the head {head.get(name)}"
    for pod in view.pods:
        if "envFrom" in pod.container:
            yield f"{pod.name}: envFrom is not looked into; write the variables out"


def switches(pod: Pod) -> dict[str, object]:
    return {item["name"]: item.get("value") for item in pod.container["env"] if item["name"].startswith("RAY_SERVE_")}


def one_version(view: View) -> Iterator[str]:
    installed = importlib.metadata.version("ray")
    if view.cluster["rayVersion"] != installed:
        yield f"rayVersion is {view.cluster['rayVersion']}, ours is {installed}"
    if len({pod.container["image"] for pod in view.pods}) != 1:
        yield "head and workers must run the same image"


def times_in_order(view: View) -> Iterator[str]:
    graceful = view.graceful_shutdown_s()
    if view.spec.get("rayClusterDeletionDelaySeconds", 60) <= graceful:
        yield f"rayClusterDeletionDelaySeconds must be more than the {graceful:g} s that a replica may take to stop"
    for pod in view.workers:
        grace = pod.spec.get("terminationGracePeriodSeconds", 30)
        hook = " ".join(pod.container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", []))
        match = re.fullmatch(r"python -m deployments\.leave (\d+)", hook)
        if match is None:
            yield f"{pod.name}: preStop does not drain the node: SIGTERM alone cuts the streams"
            continue
        deadline = int(match[1])
        if not graceful < deadline:
            yield f"{pod.name}: the drain's deadline of {deadline} s must be more than the {graceful:g} s of a stopping replica"
        if not deadline + MARGIN_S < grace:
            yield f"{pod.name}: terminationGracePeriodSeconds {grace} must be more than the drain of {deadline + MARGIN_S} s"


def shared_memory(view: View) -> Iterator[str]:
    for pod in view.pods:
        mounts = {mount["mountPath"]: mount["name"] for mount in pod.container.get("volumeMounts", [])}
        volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", [])}
        memory = volumes.get(mounts.get("/dev/shm", ""), {}).get("emptyDir", {})
        if memory.get("medium") != "Memory" or "sizeLimit" not in memory:
            yield f"{pod.name}: /dev/shm must be an emptyDir in Memory with a sizeLimit"
        elif not quantity(memory["sizeLimit"]) < pod.amount("memory") / 2:
            yield f"{pod.name}: /dev/shm of {memory['sizeLimit']} counts as the pod's memory; at most half of its limit"
        for name in mounts.values():
            if name not in volumes:
                yield f"{pod.name}: volume {name} is mounted and not there"


def known_probes(view: View) -> Iterator[str]:
    for pod in view.pods:
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            probe = pod.container.get(kind)
            if probe is None:
                yield f"{pod.name}: no {kind}"
                continue
            for port, path in probed(probe):
                if path not in known_paths().get(port, ()):
                    yield f"{pod.name}: {kind} asks port {port} for {path}, which nobody answers"
        asked = {port for port, _ in probed(pod.container.get("readinessProbe", {}))}
        if pod.group is not None and SERVE_PORT not in asked:
            yield f"{pod.name}: readiness must ask Serve's proxy"


def probed(probe: dict[str, Any]) -> Iterator[tuple[int, str]]:
    if "httpGet" in probe:
        yield probe["httpGet"]["port"], probe["httpGet"]["path"]
    for port, path in re.findall(r"http://localhost:(\d+)(\S+)", " ".join(probe.get("exec", {}).get("command", []))):
        yield int(port), path


def known_paths() -> dict[int, set[str]]:
    """What the installed Ray answers: routes of its agent, and of its HAProxy."""
    agent = set(re.findall(r'@routes\.get\("([^"]+)"\)', inspect.getsource(healthz_agent)))
    proxy = set(re.findall(r'health_check_endpoint: str = "([^"]+)"', inspect.getsource(haproxy)))
    assert agent and proxy
    return {AGENT_PORT: agent, SERVE_PORT: proxy}


# -- room for what Serve will place


def enough_gpus(view: View) -> Iterator[str]:
    bundles = view.deployments[SCHEDULER]._replica_config.placement_group_bundles
    per_engine = int(sum(bundle.get("GPU", 0) for bundle in bundles))
    with_gpus = [pod for pod in view.workers if pod.gpus]
    if per_engine == 0:
        yield from (f"{pod.name}: has {pod.gpus} GPUs, and the configuration uses none" for pod in with_gpus)
        return
    size = view.config.tensor_parallel_size
    one_node = view.config.placement_strategy == "STRICT_PACK"
    for pod in with_gpus:
        if one_node and pod.gpus % per_engine:
            yield f"{pod.name}: {pod.gpus} {GPU}, not a multiple of tensor_parallel_size {size}"
    room = sum(pod.gpus * (pod.group or {})["maxReplicas"] for pod in with_gpus)
    needed = per_engine * view.most_replicas(SCHEDULER)
    if room < needed:
        yield f"{SCHEDULER}: up to {needed} GPUs, the worker groups have at most {room}"


def enough_cpus(view: View) -> Iterator[str]:
    room = sum(pod.amount("cpu") * (pod.group or {})["maxReplicas"] for pod in view.workers)
    needed = 0.0
    for name, deployment in view.deployments.items():
        config = deployment._replica_config
        bundles = config.placement_group_bundles or [{"CPU": config.ray_actor_options["num_cpus"]}]
        needed += view.most_replicas(name) * sum(bundle.get("CPU", 0) for bundle in bundles)
    if room < needed:
        yield f"the application takes up to {needed:g} CPUs, the worker groups have at most {room:g}"


def group_sizes(view: View) -> Iterator[str]:
    for pod in view.workers:
        group = pod.group or {}
        if not group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]:
            yield f"{pod.name}: minReplicas <= replicas <= maxReplicas does not hold"


def autoscaled_as_the_cluster_is(view: View) -> Iterator[str]:
    strategy = view.spec["upgradeStrategy"]
    if not view.cluster.get("enableInTreeAutoscaling"):
        yield "enableInTreeAutoscaling must be true: Serve's autoscaling, and incremental upgrades, need it"
    if strategy["type"] not in ("NewCluster", "NewClusterWithIncrementalUpgrade"):
        yield f"upgradeStrategy.type {strategy['type']} is none of NewCluster, NewClusterWithIncrementalUpgrade"
    options = strategy.get("clusterUpgradeOptions")
    if (strategy["type"] == "NewClusterWithIncrementalUpgrade") != (options is not None):
        yield "clusterUpgradeOptions belong to NewClusterWithIncrementalUpgrade, which needs them"
    if options and not 0 < options["stepSizePercent"] <= options.get("maxSurgePercent", 100) <= 100:
        yield "clusterUpgradeOptions: 0 < stepSizePercent <= maxSurgePercent <= 100 does not hold"


# -- what surrounds the pods


def network(view: View) -> Iterator[str]:
    policies = view.kind("NetworkPolicy")
    ours = Source("a pod of the server", view.head.labels, own_namespace=True)
    for pod in view.pods:
        for port in INNER_PORTS:
            if not allowed(policies, pod.labels, ours, port):
                yield f"NetworkPolicy: {ours.name} must reach port {port} of {pod.name} (Ray, zmq, torch.distributed)"
            for source in (OUTSIDE, STRANGER):
                if allowed(policies, pod.labels, source, port):
                    yield f"NetworkPolicy: {source.name} reaches port {port} of {pod.name}"
        wanted = [(STRANGER, SERVE_PORT), (PROMETHEUS, 8080), (OPERATOR, 8265), (OPERATOR, SERVE_PORT)]
        for source, port in wanted:
            if not allowed(policies, pod.labels, source, port):
                yield f"NetworkPolicy: {source.name} must reach port {port} of {pod.name}"
    for store in view.kind("StatefulSet"):
        labels = store["spec"]["template"]["metadata"]["labels"]
        if not allowed(policies, labels, ours, 6379):
            yield "NetworkPolicy: the head must reach Redis"
        for source in (OUTSIDE, STRANGER):
            if allowed(policies, labels, source, 6379):
                yield f"NetworkPolicy: {source.name} reaches Redis"


def budgets(view: View) -> Iterator[str]:
    covered = set()
    for budget in view.kind("PodDisruptionBudget"):
        name, spec = budget["metadata"]["name"], budget["spec"]
        chosen = [pod for pod in view.pods if matches(spec["selector"], pod.labels)]
        covered |= {pod.name for pod in chosen}
        if not chosen:
            yield f"PodDisruptionBudget {name}: its selector matches no pod"
        if not isinstance(spec.get("minAvailable"), int) or "maxUnavailable" in spec:
            yield f"PodDisruptionBudget {name}: for a RayCluster's pods Kubernetes takes only a number as minAvailable"
        elif chosen and spec["minAvailable"] >= sum((pod.group or {"minReplicas": 1})["minReplicas"] for pod in chosen):
            yield f"PodDisruptionBudget {name}: with the fewest pods no node could be drained, ever"
    yield from (f"{pod.name}: no PodDisruptionBudget" for pod in view.workers if pod.name not in covered)


def references(view: View) -> Iterator[str]:
    """Secrets, claims and ConfigMaps that pods name must be in the manifests, or made by a command of k8s/README.md."""
    there: set[tuple[str, str, str | None]] = {
        (document["kind"], document["metadata"]["name"], None) for document in view.documents
    }
    there |= {("Secret", name, key) for name, keys in readme_secrets().items() for key in (None, *keys)}
    for kind, name, key, optional in referenced(view.documents):
        if not optional and (kind, name, key) not in there and (kind, name, None) not in there:
            yield f"{kind} {name} is used and defined nowhere"
        elif kind == "Secret" and (kind, name, key) not in there:
            yield f"Secret {name} has no key {key} in k8s/README.md"


def readme_secrets() -> dict[str, set[str]]:
    """Name -> keys of the Secrets that the README creates."""
    commands = re.sub(r"\\\n\s*", " ", README.read_text())
    return {
        name: set(re.findall(r"--from-(?:literal|file)=([\w-]+)=", options))
        for name, options in re.findall(r"^kubectl create secret generic (\S+) (.*)$", commands, re.MULTILINE)
    }


def referenced(value: Any) -> Iterator[tuple[str, str, str | None, bool]]:
    """(kind, name, key, optional), wherever in the documents."""
    if isinstance(value, list):
        for item in value:
            yield from referenced(item)
    if not isinstance(value, dict):
        return
    for key, item in value.items():
        if key in ("secretKeyRef", "configMapKeyRef"):
            yield (
                "Secret" if key == "secretKeyRef" else "ConfigMap",
                item["name"],
                item["key"],
                item.get("optional", False),
            )
        elif key == "secret" and "secretName" in item:
            yield "Secret", item["secretName"], None, item.get("optional", False)
        elif key == "persistentVolumeClaim":
            yield "PersistentVolumeClaim", item["claimName"], None, False
        else:
            yield from referenced(item)


def key_files(view: View) -> Iterator[str]:
    """What the configuration reads must be mounted in every pod: the application may be built on any of them."""
    for field in ("api_keys_file", "admin_api_keys_file"):
        file = vars(view.config)[field]
        if file is None:
            yield f"args: {field} is not set: everybody may use the server"
            continue
        for pod in view.pods:
            yield from (f"{pod.name}: {field}: {problem}" for problem in unmounted(pod, Path(file)))


def unmounted(pod: Pod, file: Path) -> Iterator[str]:
    mount = next((one for one in pod.container["volumeMounts"] if Path(one["mountPath"]) == file.parent), None)
    if mount is None:
        yield f"nothing is mounted at {file.parent}"
        return
    volume = next(one for one in pod.spec["volumes"] if one["name"] == mount["name"])
    secret = volume.get("secret", {}).get("secretName")
    if secret is None or file.name not in readme_secrets().get(secret, ()):
        yield f"{file.name} is no key of the Secret {secret} in k8s/README.md"


def fault_tolerance(view: View) -> Iterator[str]:
    if view.cluster.get("authOptions", {}).get("mode") != "token":
        yield "authOptions.mode must be token: without it, who reaches the dashboard runs code"
    options = view.cluster.get("gcsFaultToleranceOptions")
    if options is None:
        yield "gcsFaultToleranceOptions: without them the end of the head is the end of the cluster"
        return
    services = {
        f"{one['metadata']['name']}:{port['port']}" for one in view.kind("Service") for port in one["spec"]["ports"]
    }
    if options["redisAddress"] not in services:
        yield f"gcsFaultToleranceOptions: redisAddress {options['redisAddress']} is no Service here"


def monitored_ports(view: View) -> Iterator[str]:
    for monitor in view.kind("PodMonitor"):
        chosen = [pod for pod in view.pods if matches(monitor["spec"]["selector"], pod.labels)]
        ports = {port["name"] for pod in chosen for port in pod.container["ports"]}
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            if endpoint["port"] not in ports:
                yield f"PodMonitor {monitor['metadata']['name']}: no pod has a port {endpoint['port']}"
            if endpoint["port"] == "serve" and len(chosen) != 1:
                yield f"PodMonitor {monitor['metadata']['name']}: /metrics holds the whole application: ask one pod, not each"


EARLY: tuple[Callable[[View], Iterator[str]], ...] = (serve_document,)
LATE: tuple[Callable[[View], Iterator[str]], ...] = (
    deployment_names,
    proxies_where_probes_ask_for_them,
    equal_environment,
    one_version,
    times_in_order,
    shared_memory,
    known_probes,
    enough_gpus,
    enough_cpus,
    group_sizes,
    autoscaled_as_the_cluster_is,
    network,
    budgets,
    references,
    key_files,
    fault_tolerance,
    monitored_ports,
)
