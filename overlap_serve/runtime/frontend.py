"""`Frontend`: all that one ingress replica does with a request, without HTTP and without Ray.

    body -> parse -> admission -> render, tokenize (threads) -> budget -> GenerateRequest -> in flight -> Reply

Owns admission, and what the replica says about itself: models, health, metrics. Does not know what `submit` does or how schedulers are
found (`Cluster`). Everything runs on one event loop except `Preparer`'s threads.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

from prometheus_client import CollectorRegistry

from overlap_serve import __version__
from overlap_serve.config import ModelFacts, ServeConfig
from overlap_serve.errors import InternalError, NotFound, QueueFull, RequestError, ServerUnavailable
from overlap_serve.messages import GenerateRequest, ReplicaStatus, Route
from overlap_serve.metrics import IngressMetrics, TransportMetrics, build_info, merge, snapshot
from overlap_serve.openai.protocol import ignored_label, parse_json, refuse_embeddings
from overlap_serve.openai.response import model_card, model_list
from overlap_serve.runtime.control import Control, Schedulers
from overlap_serve.runtime.inflight import RETRY_S, InFlight, Submit, aborted
from overlap_serve.runtime.metric_names import with_names
from overlap_serve.runtime.prepare import Answered, Body, Prepared, Preparer
from overlap_serve.runtime.probe import Probe
from overlap_serve.runtime.reply import Reply
from overlap_serve.runtime.streams import Answer
from overlap_serve.text.template import TextModel

log = logging.getLogger(__name__)

ID_BYTES = 4
SCRAPE_S = 1.0  # how long one /metrics answer is reused
WATCH_S = 1.0
GONE_AFTER = 3  # looks; one late answer to the cluster is no death
LOADING_RETRY_S = 5.0


class Cluster(Schedulers, Protocol):
    """What an ingress knows of the other processes; kept fresh by its owner, answered from memory."""

    def detokenizers(self) -> Sequence[str]:
        """Endpoints that take new requests."""

    def leaving_detokenizers(self) -> Sequence[str]:
        """Endpoints that only finish what they have. Requests whose endpoint stays out of both lists for seconds are failed."""

    def replicas(self) -> Sequence[ReplicaStatus]:
        """Scheduler replicas, as last heard."""

    async def metric_snapshots(self) -> list[bytes]:
        """Expositions of all other processes: schedulers, detokenizers, other ingresses."""

    async def abort_everywhere(self, label: str | None) -> int:
        """`Frontend.abort` in all other ingress replicas; the sum of their numbers."""


@dataclass(frozen=True)
class Call:
    """What a transport knows of a request beside its body.

    label: the client's request id, only a name. timeout_s: of a header; the smaller of it and the body's counts.
    """

    label: str
    timeout_s: float | None = None


class Frontend:
    """bind: zmq address of the inbox for text deltas. submit, cluster: see their types."""

    def __init__(
        self,
        config: ServeConfig,
        text: TextModel,
        facts: ModelFacts,
        *,
        bind: str,
        key: bytes,
        submit: Submit,
        cluster: Cluster,
        replica: str,
        registry: CollectorRegistry,
    ) -> None:
        self.config = config
        self._cluster = cluster
        self._registry = registry
        build_info(registry, replica)
        self._fingerprint = fingerprint(config)
        self._created = int(time.time())
        self._tokenizer = text.tokenizer
        self._preparer = Preparer(config, text, facts)
        self._metrics = IngressMetrics(registry, config.model_name, replica)
        hops = TransportMetrics(registry, replica)
        self._inflight = InFlight(bind, key, submit, self._metrics, hops, config.slow_client_timeout)
        self._probe = Probe(bind, key, submit, config.ready_stall_s) if config.health_generate else None
        self.control = Control(config, cluster, lambda: self.abort_everywhere(None))
        self._watcher: asyncio.Task[None] | None = None
        self._draining = False
        self._was_ready = False
        self._scrape = b""
        self._scraped_s = 0.0

    # -- life cycle

    @property
    def endpoint(self) -> str:
        """Where detokenizers send."""
        return self._inflight.endpoint

    @property
    def num_open(self) -> int:
        """Accepted requests that have not ended."""
        return len(self._inflight)

    def check_at_rest(self) -> None:
        """AssertionError unless nothing is left of any request; for tests."""
        self._inflight.check_at_rest()

    async def start(self) -> None:
        """Receive on the running event loop, where all other methods must be called too."""
        self._inflight.start()
        if self._probe is not None:
            self._probe.start()
        self._watcher = asyncio.create_task(self._watch())

    def drain(self) -> None:
        """Not ready any more: new requests are refused, open ones go on."""
        self._draining = True

    async def close(self) -> None:
        """End what is open with abort/shutdown, then release sockets and threads."""
        self.drain()
        if self._watcher is not None:
            self._watcher.cancel()
        if self._probe is not None:
            await self._probe.close()
        await self._inflight.close()
        self._preparer.close()

    # -- requests

    async def submit(self, body: Body, call: Call) -> Reply:
        """Check, prepare and start a request. Raises RequestError: nothing was started, and it was counted as rejected."""
        arrival_s = self._now()
        try:
            request = await self._preparer.parse(body)
            for field in request.ignored_fields:
                self._metrics.ignored(ignored_label(field))
            capacity = self._admit(request.n)
            prepared = await self._preparer.tokenize(request, body.big, capacity)
            self._admit(request.n)  # again: that took time
            return self._start(prepared, call, arrival_s)
        except RequestError as error:
            self.reject(error)
            raise
        except Exception:
            self._metrics.rejected(InternalError.code)
            raise

    def reject(self, error: RequestError) -> None:
        """Count a request that was refused before `submit` could see it: for its key, path, method, headers or size."""
        self._metrics.rejected(error.code)

    def abort(self, label: str | None) -> int:
        """Abort the open requests of this replica that have this client request id (None: all). Returns their number."""
        return self._inflight.abort(label)

    async def abort_everywhere(self, label: str | None) -> int:
        """`abort` in every ingress replica: a client's requests may be at any of them."""
        return self.abort(label) + await self._cluster.abort_everywhere(label)

    async def tokenize(self, data: bytes) -> Answered:
        """Body of POST /tokenize -> answer; works whether the engine does or not. Raises RequestError."""
        return self._counted(await self._preparer.tokenize_only(data))

    async def detokenize(self, data: bytes) -> Answered:
        """Body of POST /detokenize -> answer. Raises RequestError."""
        return self._counted(await self._preparer.detokenize_only(data))

    def embed(self, data: bytes) -> NoReturn:
        """Body of POST /v1/embeddings: this server has no model for it. Raises RequestError."""
        refuse_embeddings(parse_json(data), self.config, self._preparer.facts)

    def _counted(self, answered: Answered) -> Answered:
        for field in answered.ignored_fields:
            self._metrics.ignored(ignored_label(field))
        return answered

    def _start(self, prepared: Prepared, call: Call, arrival_s: float) -> Reply:
        request = prepared.request
        timeouts_s = [timeout_s for timeout_s in (request.timeout_s, call.timeout_s) if timeout_s is not None]
        timeout_s = min(timeouts_s) - (self._now() - arrival_s) if timeouts_s else None
        if timeout_s is not None and timeout_s <= 0:
            raise aborted("deadline")
        lengths = [len(prompt) // ID_BYTES for prompt in prepared.prompts]
        interval_s = self.config.stream_interval_ms / 1e3
        answer = Answer(request.label or call.label, lengths, request.n, arrival_s, interval_s)
        detokenizers = self._cluster.detokenizers()
        requests = [
            GenerateRequest(
                rid=uuid.uuid4().hex,
                attempt=0,
                prompt=prompt,
                n=request.n,
                sampling=sampling,
                text=prepared.text,
                route=Route(self._inflight.choose_detokenizer(detokenizers), self.endpoint),
                priority=request.priority,
                timeout_s=timeout_s,
                cache_salt=request.cache_salt,
            )
            for prompt, sampling in zip(prepared.prompts, prepared.sampling, strict=True)
        ]
        self._inflight.accept(answer, requests, timeout_s)
        return Reply(prepared, answer, self._fingerprint, self._inflight.leave, self._tokenizer)

    # -- admission

    def _admit(self, n: int) -> int:
        """KV capacity that every replica has, in tokens. n: choices of one prompt.

        Raises ServerUnavailable, QueueFull: before any work is done.
        """
        status = self._status()
        if status != "ready":
            code, advice = _UNAVAILABLE[status]
            raise ServerUnavailable(f"the server {advice}", code=code, retry_after_s=LOADING_RETRY_S)
        ready = [replica for replica in self._cluster.replicas() if replica.status == "ready"]
        # What was heard of the schedulers is older than what this replica has sent since: count both ways.
        unstarted = self._inflight.num_unstarted - len(ready) * self.config.max_running_requests
        waiting = max(sum(replica.waiting for replica in ready), unstarted)
        limit = self.config.max_waiting_requests * len(ready)
        if waiting > 0 and waiting + n > limit:  # an idle server takes whatever one request may ask
            raise QueueFull(f"{waiting} requests wait, the limit is {limit}; try again later", retry_after_s=RETRY_S)
        return min(replica.capacity_tokens for replica in ready)

    # -- state for health checks, models and metrics

    def models(self) -> dict[str, object]:
        """Answer of GET /v1/models; the same from start to end, ready or not."""
        return model_list([self._card()])

    def model(self, name: str) -> dict[str, object]:
        """Raises NotFound."""
        if name != self.config.model_name:
            raise NotFound(
                f"the model {name[:64]!r} does not exist; this server has {self.config.model_name!r}", param="model"
            )
        return self._card()

    def _card(self) -> dict[str, object]:
        return model_card(
            id=self.config.model_name,
            created=self._created,
            root=self.config.model if self.config.engine == "torch" else "fake",
            max_model_len=self._preparer.facts.max_model_len,
        )

    def health_live(self) -> tuple[int, dict[str, object]]:
        """This process alone: a dead scheduler is its own supervisor's to replace, and must not get the ingress killed."""
        return 200, self._health("draining" if self._draining else "ready")

    def health_ready(self) -> tuple[int, dict[str, object]]:
        """200 while a request would be taken (queue length aside)."""
        status = self._status()
        return 200 if status == "ready" else 503, self._health(status)

    def health_startup(self) -> tuple[int, dict[str, object]]:
        """200 from the first moment on in which this server was ready, whatever happens later."""
        status = self._status()
        return 200 if self._was_ready else 503, self._health(status)

    async def health_generate(self) -> tuple[int, dict[str, object]]:
        """200 when a token was made and came back within `ready_stall_s`. Raises NotFound unless the configuration wants this."""
        if self._probe is None:
            raise NotFound(
                "this check is off; set health_generate: true in the server's configuration", code="unknown_url"
            )
        status, seconds = self._status(), None
        if status == "ready":
            try:
                seconds = await self._probe.run(self._cluster.detokenizers())
            except RequestError as error:
                log.warning("the engine did not make a token for /health/generate: %s", error.message)
                status = "stalled"
        return 200 if status == "ready" else 503, {**self._health(status), "generate_s": seconds}

    def load(self) -> dict[str, object]:
        """Answer of GET /load. server_load: requests that run or wait in the engines. kv_usage: of the fullest engine, 0 to 1."""
        replicas = self._cluster.replicas()
        running = sum(replica.running for replica in replicas)
        waiting = sum(replica.waiting for replica in replicas)
        return {
            "server_load": running + waiting,
            "running": running,
            "waiting": waiting,
            "kv_usage": max((replica.kv_usage for replica in replicas), default=0.0),
        }

    def metrics_snapshot(self) -> bytes:
        """This process alone."""
        return snapshot(self._registry)

    async def metrics(self) -> bytes:
        """The whole application, in the Prometheus text format."""
        now_s = asyncio.get_running_loop().time()
        if not self._scrape or now_s - self._scraped_s > SCRAPE_S:
            others = await self._cluster.metric_snapshots()
            self._scrape = with_names(merge([self.metrics_snapshot(), *others]), self.config.metrics_compat)
            self._scraped_s = now_s
        return self._scrape

    def _status(self) -> str:
        """One word for all schedulers: that of the best."""
        if self._draining:
            return "draining"
        known = {replica.status for replica in self._cluster.replicas()}
        best = next((status for status in _BEST_FIRST if status in known), "loading")
        if best == "ready" and not self._cluster.detokenizers():
            best = "loading"
        self._was_ready |= best in ("ready", "paused")
        if best == "ready" and self._cluster.paused():
            best = "paused"  # schedulers that have just started do not know it yet
        return best

    def _health(self, status: str) -> dict[str, object]:
        replicas = self._cluster.replicas()
        return {
            "status": status,
            "last_step_age_s": max((replica.last_step_age_s for replica in replicas), default=0.0),
            "running": sum(replica.running for replica in replicas),
            "waiting": sum(replica.waiting for replica in replicas),
            "replicas": [
                {
                    "replica": replica.replica,
                    "status": replica.status,
                    "last_step_age_s": replica.last_step_age_s,
                    "running": replica.running,
                    "waiting": replica.waiting,
                }
                for replica in replicas
            ],
        }

    async def _watch(self) -> None:
        """A detokenizer that dies takes text state along and says nothing: see its endpoint leave, and not come back."""
        missing: Counter[str] = Counter()
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                missing = self._look(missing)
            except Exception:  # one bad round must not end all later ones
                log.exception("could not look after the detokenizers")

    def _look(self, missing: Counter[str]) -> Counter[str]:
        """How many looks in a row each endpoint in use has been missing; fails the requests of those that are gone."""
        self._status()  # keeps `_was_ready`, also when nobody asks
        up = {*self._cluster.detokenizers(), *self._cluster.leaving_detokenizers()}
        now_missing = self._inflight.detokenizers_in_use() - up
        missing = Counter({endpoint: missing[endpoint] + 1 for endpoint in now_missing})
        if gone := {endpoint for endpoint, times in missing.items() if times >= GONE_AFTER}:
            log.warning("detokenizers are gone: %s", ", ".join(sorted(gone)))
            self._inflight.lose_detokenizers(gone)
        return missing

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


# Replica states from best to worst, and what a refused request is told.
_BEST_FIRST = ("ready", "loading", "paused", "draining", "stalled", "dead")
_UNAVAILABLE = {
    "loading": ("server_loading", "is loading the model; try again later"),
    "paused": ("server_paused", "is paused; try again later"),
    "draining": ("server_draining", "is shutting down; try again, another one will answer"),
    "stalled": ("engine_failed", "makes no progress; try again later"),
    "dead": ("engine_failed", "has lost its engine; try again later"),
}


def fingerprint(config: ServeConfig) -> str:
    """`system_fingerprint`: changes with model, weights and version of the server."""
    parts = (__version__, config.model, str(config.revision), config.load_format, str(config.seed), config.dtype)
    return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
