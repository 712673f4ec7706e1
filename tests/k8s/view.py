"""Rendered documents as the rules look at them: pods of the RayService with the labels that KubeRay adds, and the Serve configuration
inside it as the application that `deployments.app:build` makes of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import yaml
from ray.serve import Deployment

from deployments.app import DETOKENIZER, INGRESS, SCHEDULER, build
from overlap_serve.config import ServeConfig, parse_config

Document = Any
DEPLOYMENTS = frozenset({INGRESS, SCHEDULER, DETOKENIZER})
GPU = "nvidia.com/gpu"
UNITS = {"": 1, "m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def quantity(text: object) -> float:
    """Kubernetes' notation of an amount: cores or bytes."""
    match = re.fullmatch(r"([0-9.]+)(\w*)", str(text))
    assert match is not None, text
    return float(match[1]) * UNITS[match[2]]


@dataclass(frozen=True)
class Pod:
    """A pod of the RayService, as KubeRay makes it. group: the worker group as it stands; None for the head."""

    name: str
    labels: dict[str, str]
    spec: dict[str, Any]
    group: dict[str, Any] | None

    @property
    def container(self) -> dict[str, Any]:
        """Ray's own is the first."""
        first: dict[str, Any] = self.spec["containers"][0]
        return first

    def amount(self, resource: str) -> float:
        """What Ray counts: KubeRay takes limits, else requests."""
        resources = self.container["resources"]
        return quantity(resources.get("limits", {}).get(resource, resources.get("requests", {}).get(resource, 0)))

    @property
    def gpus(self) -> int:
        return int(self.amount(GPU))


def pod(template: dict[str, Any], node_type: str, group: str, spec: dict[str, Any] | None) -> Pod:
    added = {
        "app.kubernetes.io/name": "kuberay",
        "ray.io/node-type": node_type,
        "ray.io/group": group,
        "ray.io/cluster": "overlap-serve-x",
    }
    return Pod(
        name="head" if spec is None else f"group {group}",
        labels=added | template.get("metadata", {}).get("labels", {}),
        spec=template["spec"],
        group=spec,
    )


@cache  # half a second each
def built(config: ServeConfig) -> dict[str, Deployment]:
    """Made by `build`; with the fake engine, so that no model is fetched, and without the key files, which are in the pods."""
    without = {"engine": "fake", "api_keys_file": None, "admin_api_keys_file": None}
    app = build(config.model_copy(update=without))
    ingress = app._bound_deployment
    bound = [ingress, *(argument._bound_deployment for argument in ingress.init_args[1:])]
    return {deployment.name: deployment for deployment in bound}


class View:
    """Raises nothing for mistakes that have a rule: what cannot be read is read when its rule asks."""

    def __init__(self, documents: list[Document]) -> None:
        self.documents = documents

    def kind(self, kind: str) -> list[Document]:
        return [document for document in self.documents if document["kind"] == kind]

    @cached_property
    def spec(self) -> dict[str, Any]:
        [service] = self.kind("RayService")
        found: dict[str, Any] = service["spec"]
        return found

    @property
    def cluster(self) -> dict[str, Any]:
        found: dict[str, Any] = self.spec["rayClusterConfig"]
        return found

    @cached_property
    def head(self) -> Pod:
        return pod(self.cluster["headGroupSpec"]["template"], "head", "headgroup", None)

    @cached_property
    def workers(self) -> list[Pod]:
        return [
            pod(group["template"], "worker", group["groupName"], group) for group in self.cluster["workerGroupSpecs"]
        ]

    @property
    def pods(self) -> list[Pod]:
        return [self.head, *self.workers]

    @cached_property
    def serve(self) -> dict[str, Any]:
        found: dict[str, Any] = yaml.load(self.spec["serveConfigV2"], yaml.CSafeLoader)
        return found

    @property
    def application(self) -> dict[str, Any]:
        [only] = self.serve["applications"]
        found: dict[str, Any] = only
        return found

    @cached_property
    def config(self) -> ServeConfig:
        return parse_config(self.application["args"])

    @cached_property
    def deployments(self) -> dict[str, Deployment]:
        return built(self.config)

    def override(self, deployment: str) -> dict[str, Any]:
        """What the file says under `deployments`, which wins over `build`."""
        entries = self.application.get("deployments", [])
        return next((entry for entry in entries if entry["name"] == deployment), {})

    def most_replicas(self, deployment: str) -> int:
        entry = self.override(deployment)
        if "autoscaling_config" in entry:
            return int(entry["autoscaling_config"]["max_replicas"])
        return int(entry.get("num_replicas") or self.deployments[deployment].num_replicas)

    def graceful_shutdown_s(self) -> float:
        """The longest that a replica may take to stop."""
        return max(
            float(
                self.override(name).get(
                    "graceful_shutdown_timeout_s", deployment._deployment_config.graceful_shutdown_timeout_s
                )
            )
            for name, deployment in self.deployments.items()
        )
