"""`deployments.app:build`: the application that serve_config.yaml names. Decides deployment options; knows no request.

Ingress (HTTP) --> Scheduler (engines)        both handles are bound into the ingress;
        `--------> Detokenizer (text pool)    entries under `deployments:` in the YAML win over what is decided here
"""

# No `from __future__ import annotations`: Serve reads the class of `args` from the signature to validate it.
import importlib.metadata
import logging
import os
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve import Application

from deployments.detokenizer import DetokenizerReplica
from deployments.ingress import IngressReplica
from deployments.key_files import with_key_files
from deployments.logs import configure_logging
from deployments.scheduler import SchedulerReplica
from overlap_serve.config import ServeConfig, check_model
from overlap_serve.runtime.model import model_facts, model_folder

log = logging.getLogger(__name__)

INGRESS = "Ingress"
SCHEDULER = "Scheduler"
DETOKENIZER = "Detokenizer"

# Shares of a CPU that Ray reserves, not limits: small, so that a 1-core machine can hold the whole application.
SMALL_CPU = 0.1
CPU_RANK = 0.5
GPU_RANK = 1

DRAIN_MARGIN_S = 15.0  # between the end of draining and Serve's kill: time for terminal events
CALL_SLACK = 256  # calls above what a scheduler holds or queues; it must be the scheduler that refuses, not Serve
THROUGHPUT = ("RAY_SERVE_ENABLE_HA_PROXY", "RAY_SERVE_THROUGHPUT_OPTIMIZED")


def build(args: ServeConfig) -> Application:
    """The application for a configuration. Prepares the model first (download, conversion), with progress, on this node.

    Raises pydantic.ValidationError (through Serve) or ConfigError naming the field, ModelLoadError naming the file.
    """
    configure_logging()
    config = with_key_files(args).model_copy(update={"device": decide_device(args)})
    report(config)
    if config.engine != "fake":
        log.info("model folder: %s", model_folder(config, progress=True))
    check_model(config, model_facts(config))
    scheduler = serve.deployment(SchedulerReplica, name=SCHEDULER, **scheduler_options(config))
    detokenizer = serve.deployment(DetokenizerReplica, name=DETOKENIZER, **detokenizer_options(config))
    ingress = serve.deployment(IngressReplica, name=INGRESS, **ingress_options(config))
    return ingress.bind(config, scheduler.bind(config), detokenizer.bind(config))


def common_options(config: ServeConfig) -> dict[str, Any]:
    return {
        "graceful_shutdown_timeout_s": config.drain_timeout + DRAIN_MARGIN_S,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": 2.0,
        "max_constructor_retry_count": 3,
    }


def ingress_options(config: ServeConfig) -> dict[str, Any]:
    return {
        **common_options(config),
        "num_replicas": config.ingress_replicas,
        "max_ongoing_requests": 4096,
        "max_surge_percent": 100,  # a redeploy starts the new one first; it costs no device
        "ray_actor_options": {"num_cpus": SMALL_CPU},
    }


def detokenizer_options(config: ServeConfig) -> dict[str, Any]:
    # No stream is a Serve request here; the limit only has to let the ingress replicas' broadcasts through.
    return {
        **common_options(config),
        "num_replicas": config.detokenizer_replicas,
        "max_ongoing_requests": 1024,
        "max_surge_percent": 100,
        "ray_actor_options": {"num_cpus": SMALL_CPU},
    }


def scheduler_options(config: ServeConfig) -> dict[str, Any]:
    """One placement group per replica: [control plane, one bundle per rank]."""
    rank = {"CPU": GPU_RANK, "GPU": 1} if config.device == "cuda" else {"CPU": CPU_RANK}
    capacity = config.max_running_requests + config.max_waiting_requests
    return {
        **common_options(config),
        "num_replicas": config.scheduler_replicas,
        "max_ongoing_requests": capacity + CALL_SLACK,
        "max_queued_requests": 4 * (capacity + CALL_SLACK),
        "ray_actor_options": {"num_cpus": SMALL_CPU},
        "placement_group_bundles": [{"CPU": SMALL_CPU}, *([rank] * config.tensor_parallel_size)],
        "placement_group_strategy": config.placement_strategy,
    }


def decide_device(config: ServeConfig) -> str:
    """`device` without "auto": the bundles must be known before any process of the engine exists."""
    if config.device != "auto":
        return config.device
    wants_gpu = config.engine == "torch" and torch_has_cuda() and cluster_has_gpu()
    return "cuda" if wants_gpu else "cpu"


def cluster_has_gpu() -> bool:
    """In the cluster that is up; before one is (`serve run deployments.app:build`), on this machine."""
    if ray.is_initialized():
        return bool(ray.cluster_resources().get("GPU", 0) >= 1)
    return Path("/proc/driver/nvidia/gpus").is_dir()


def torch_has_cuda() -> bool:
    """By the version's local part ("2.13.0+cpu"): importing torch only for this would cost seconds."""
    return not importlib.metadata.version("torch").endswith("+cpu")


def report(config: ServeConfig) -> None:
    """What is about to start, and what would make it slow or keep it from starting."""
    log.info(
        "model %s, engine %s on %s: %d ingress, %d scheduler, %d detokenizer replica(s)",
        config.model,
        config.engine,
        config.device,
        config.ingress_replicas,
        config.scheduler_replicas,
        config.detokenizer_replicas,
    )
    settings = {name: os.environ.get(name, "0") for name in THROUGHPUT}
    log.info("throughput settings: %s", ", ".join(f"{name}={value}" for name, value in settings.items()))
    if off := [name for name, value in settings.items() if value != "1"]:
        log.warning(
            "%s off: tokens pass Serve's Python proxy, fine for trying out, slow above some 30 streams; "
            "see the comments of serve_config.yaml",
            ", ".join(off),
        )
    warn_if_too_small(config)


def warn_if_too_small(config: ServeConfig) -> None:
    """Serve would only say "pending"; a cluster that scales up may still fit, so this is no error."""
    if not ray.is_initialized():
        return
    needed: dict[str, float] = {"CPU": SMALL_CPU * (config.ingress_replicas + config.detokenizer_replicas)}
    for bundle in scheduler_options(config)["placement_group_bundles"]:
        for name, amount in bundle.items():
            needed[name] = needed.get(name, 0) + amount * config.scheduler_replicas
    there = ray.cluster_resources()
    for name, amount in needed.items():
        if amount > there.get(name, 0):
            log.warning(
                "the application needs %s %g, the cluster has %g now: replicas stay pending until it grows",
                name,
                amount,
                there.get(name, 0),
            )
