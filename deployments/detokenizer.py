"""Detokenizer deployment: the pool of text processes that all schedulers share. A replica runs one `DetokenizerService` in a thread.

Ingress replicas learn the endpoints by `broadcast("endpoint")` and put one into each request; so a replica that Serve stops is no
longer chosen a second later, and it leaves only when the requests that were routed through it have ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Iterable

import ray
from prometheus_client import Metric
from ray import serve

from deployments.cluster import REFRESH_S
from deployments.keys import application_key
from deployments.logs import configure_logging
from deployments.metrics import MetricsBridge
from deployments.poller import keep_grpc_polling
from overlap_serve.config import ServeConfig
from overlap_serve.runtime.detokenizer import DetokenizerService
from overlap_serve.runtime.metric_names import parse
from overlap_serve.runtime.model import text_model

log = logging.getLogger(__name__)

DRAIN_POLL_S = 0.1
DRAIN_MARGIN_S = 5.0  # schedulers, too, give their requests drain_timeout, and the last outputs come after it
LINGER_S = 1.2 * REFRESH_S  # ingress replicas choose this one until they have looked again
STOP_TIMEOUT_S = 5.0


class DetokenizerReplica:
    """See the module."""

    async def __init__(self, config: ServeConfig) -> None:  # type: ignore[misc]  # Ray awaits it
        self._built = False
        configure_logging()
        keep_grpc_polling()
        context = serve.get_replica_context()
        self._replica = context.replica_tag
        self._drain_timeout_s = config.drain_timeout
        self._stopping = False
        text = await asyncio.to_thread(text_model, config)
        address = f"tcp://{ray.util.get_node_ip_address()}"
        self._service = DetokenizerService(text.tokenizer, address, application_key(context.app_name), self._replica)
        self._thread = threading.Thread(target=self._run, name="detokenizer", daemon=True)
        self._thread.start()
        bridge = MetricsBridge(self._families, context.deployment, context.app_name)
        self._bridge_task = asyncio.create_task(bridge.run())
        self._built = True

    async def endpoint(self) -> str:
        """Where schedulers send tokens."""
        return self._service.endpoint

    async def metrics_snapshot(self) -> bytes:
        return self._service.metrics_snapshot()

    def record_replica_metadata(self) -> dict[str, str]:
        return {"endpoint": self._service.endpoint}

    async def check_health(self) -> None:
        if not self._thread.is_alive() and not self._stopping:
            raise RuntimeError(f"{self._replica}: the detokenizer thread has ended")

    async def __del__(self) -> None:
        """Called by Serve, which knows of no request here: wait for those whose output comes this way, running or still queued."""
        if not self._built:
            return  # the constructor has failed, and said why
        await asyncio.sleep(LINGER_S)
        deadline_s = time.monotonic() + self._drain_timeout_s + DRAIN_MARGIN_S
        while self._service.unfinished() > 0 and time.monotonic() < deadline_s:
            await asyncio.sleep(DRAIN_POLL_S)
        self._stopping = True
        self._bridge_task.cancel()
        self._service.stop()
        await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S)

    async def _families(self) -> Iterable[Metric]:
        return parse(self._service.metrics_snapshot())

    def _run(self) -> None:
        try:
            self._service.run()
        except Exception:  # a service without its thread is of no use: let Serve replace the process
            log.exception("%s: the detokenizer died; exiting", self._replica)
            os._exit(1)
