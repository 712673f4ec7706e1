"""Prometheus metrics, made per process and passed in; no default registry. Names and labels are those of http-api section 12.

Counting happens where the event happens; the ingress merges the snapshots of all processes (`merge`) into one `/metrics`.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from overlap_serve import __version__

_CREATED = re.compile(r"(# (HELP|TYPE) )?\w+_created[ {]")
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class SchedulerMetrics:
    """Counted by the loop of rank 0."""

    def __init__(self, registry: CollectorRegistry, model: str, replica: str) -> None:
        labels = {"model": model, "replica": replica}

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, list(labels), registry=registry).labels(**labels)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, list(labels), registry=registry).labels(**labels)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(name, text, list(labels), buckets=SECONDS, registry=registry).labels(**labels)

        self.running = gauge("overlap_running_requests", "choices that hold a slot")
        self._waiting = Gauge("overlap_waiting_requests", "choices that wait", [*labels, "reason"], registry=registry)
        self.waiting = {r: self._waiting.labels(**labels, reason=r) for r in ("queue", "capacity", "prefix")}
        self.queue_time = seconds("overlap_request_queue_time_seconds", "arrival to first scheduled")
        self.prefill_time = seconds("overlap_request_prefill_time_seconds", "first scheduled to first token")
        self.decode_time = seconds("overlap_request_decode_time_seconds", "first token to end")
        self.prompt_tokens = counter("overlap_prompt_tokens_total", "prompt tokens of requests that were scheduled")
        self.cached_tokens = counter("overlap_prompt_tokens_cached_total", "of them, taken from the prefix cache")
        self.generation_tokens = counter("overlap_generation_tokens_total", "tokens generated and kept")
        self.discarded_tokens = counter("overlap_discarded_tokens_total", "rows computed after their request had ended")
        self._pages = Gauge("overlap_kv_pages", "KV pages", [*labels, "state"], registry=registry)
        self.pages = {s: self._pages.labels(**labels, state=s) for s in ("free", "cached", "owned")}
        self.kv_usage = gauge("overlap_kv_usage_ratio", "owned pages over all pages")
        self.prefix_queries = counter("overlap_prefix_cache_queries_total", "tokens looked up")
        self.prefix_hits = counter("overlap_prefix_cache_hits_total", "tokens found")
        self.preemptions = counter("overlap_preemptions_total", "preemptions by recompute")
        self.repairs = counter("overlap_kv_repairs_total", "times that KV pages did not add up at rest")
        self._step = Histogram(
            "overlap_step_seconds", "host time of a step by part", [*labels, "part"], buckets=SECONDS, registry=registry
        )
        self.step_s = {p: self._step.labels(**labels, part=p) for p in ("plan", "launch", "wait", "process")}
        self.step_tokens = Histogram(
            "overlap_step_tokens", "tokens of a step", list(labels), buckets=TOKENS, registry=registry
        ).labels(**labels)
        self.host_hidden = gauge("overlap_host_hidden_ratio", "1 - device idle / host time, since start")
        self.device_idle = gauge("overlap_device_idle_ratio", "device idle share while work was there, since start")
        self.last_step_age = gauge("overlap_last_step_age_seconds", "since the loop's last progress; 0 when idle")
        self.depth = gauge("overlap_depth", "steps in flight when the next is launched")


class IngressMetrics:
    """Counted by the ingress that owns the request. accepted = finished + aborted + failed + open, at every scrape."""

    def __init__(self, registry: CollectorRegistry, model: str, replica: str) -> None:
        labels = {"model": model, "replica": replica}
        self._labels = labels

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(name, text, [*labels, *more], registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *more: str) -> Histogram:
            return Histogram(name, text, [*labels, *more], buckets=buckets, registry=registry)

        self.accepted = counter("overlap_requests_accepted_total", "requests admitted").labels(**labels)
        self._rejected = counter("overlap_requests_rejected_total", "requests refused before admission", "code")
        self._finished = counter("overlap_requests_finished_total", "requests that ended by themselves", "reason")
        self._aborted = counter("overlap_requests_aborted_total", "requests ended from outside", "cause")
        self._failed = counter("overlap_requests_failed_total", "requests that ended with an error", "code")
        self._ignored = counter("overlap_ignored_request_fields_total", "inert or unknown fields received", "field")
        self.migrated = counter("overlap_requests_migrated_total", "requests resumed elsewhere").labels(**labels)
        self.open = Gauge("overlap_open_requests", "admitted and not ended", list(labels), registry=registry).labels(
            **labels
        )
        self.late_deltas = counter("overlap_late_deltas_total", "deltas of requests that had ended, dropped").labels(
            **labels
        )
        self.ttft = histogram("overlap_time_to_first_token_seconds", "arrival to first text", SECONDS).labels(**labels)
        self.itl = histogram("overlap_inter_token_latency_seconds", "between deltas, per token", SECONDS).labels(
            **labels
        )
        self.e2e = histogram("overlap_e2e_request_latency_seconds", "arrival to end", SECONDS).labels(**labels)
        self._prompt = histogram("overlap_request_prompt_tokens", "prompt tokens", TOKENS, "finished_reason")
        self._generation = histogram("overlap_request_generation_tokens", "generated tokens", TOKENS, "finished_reason")

    def rejected(self, code: str) -> None:
        self._rejected.labels(**self._labels, code=code).inc()

    def ignored(self, field: str) -> None:
        self._ignored.labels(**self._labels, field=field).inc()

    def finished(self, reason: str) -> None:
        self._finished.labels(**self._labels, reason=reason).inc()

    def aborted(self, cause: str) -> None:
        self._aborted.labels(**self._labels, cause=cause).inc()

    def failed(self, code: str) -> None:
        self._failed.labels(**self._labels, code=code).inc()

    def tokens(self, prompt: int, generated: int, reason: str) -> None:
        self._prompt.labels(**self._labels, finished_reason=reason).observe(prompt)
        self._generation.labels(**self._labels, finished_reason=reason).observe(generated)


class DetokenizerMetrics:
    """Counted by a detokenizer replica."""

    def __init__(self, registry: CollectorRegistry, replica: str) -> None:
        self.open_streams = Gauge(
            "overlap_detokenizer_open_streams", "choices with text state", ["replica"], registry=registry
        ).labels(replica=replica)
        late = "outputs of choices that had ended or were never opened, dropped"
        self.late_outputs = Counter(
            "overlap_detokenizer_late_outputs_total", late, ["replica"], registry=registry
        ).labels(replica=replica)


class TransportMetrics:
    """Counted by every process with outboxes. hop: scheduler_detokenizer, detokenizer_ingress, ingress_scheduler, ..."""

    def __init__(self, registry: CollectorRegistry, replica: str) -> None:
        self._messages = Counter(
            "overlap_transport_messages_total", "messages sent", ["replica", "hop"], registry=registry
        )
        self._dropped = Counter(
            "overlap_transport_dropped_total", "messages that could not be sent", ["replica", "hop"], registry=registry
        )
        refused = "payloads that came with a wrong key or could not be read"
        self._refused = Counter("overlap_transport_refused_total", refused, ["replica"], registry=registry).labels(
            replica=replica
        )
        self._replica = replica

    def sent(self, hop: str, count: int) -> None:
        self._messages.labels(replica=self._replica, hop=hop).inc(count)

    def dropped(self, hop: str, count: int) -> None:
        self._dropped.labels(replica=self._replica, hop=hop).inc(count)

    def refused(self) -> None:
        self._refused.inc()


def build_info(registry: CollectorRegistry, replica: str, *, torch: str = "", attention: str = "") -> None:
    """`overlap_build_info{replica,version,torch,ray,attention} 1`; torch and attention are empty where none is loaded."""
    labels = {
        "replica": replica,
        "version": __version__,
        "torch": torch,
        "ray": _installed("ray"),
        "attention": attention,
    }
    Gauge("overlap_build_info", "what is running", list(labels), registry=registry).labels(**labels).set(1)


def _installed(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def snapshot(registry: CollectorRegistry) -> bytes:
    """All metrics of one process in the Prometheus text format, without the `_created` series that double its size."""
    lines = generate_latest(registry).decode().splitlines(keepends=True)
    return "".join(line for line in lines if not _CREATED.match(line)).encode()


def merge(snapshots: Iterable[bytes]) -> bytes:
    """One exposition of many processes: each family once, with its HELP and TYPE, samples of all processes below it.

    Label sets are disjoint because every sample carries its process' `replica`.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for text in snapshots:
        family = ""
        for line in text.decode().splitlines():
            if line.startswith("# HELP "):
                family = line.split(" ", 3)[2]
                heads.setdefault(family, [])
                samples.setdefault(family, [])
            if line.startswith("#"):
                if line not in heads[family]:
                    heads[family].append(line)
            elif line:
                samples[family].append(line)
    lines = [line for family, head in heads.items() for line in (*head, *samples[family])]
    return ("\n".join(lines) + "\n").encode()
