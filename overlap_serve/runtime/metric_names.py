"""Our metrics under other names: vLLM's and SGLang's, and flat series for exporters that have no histograms of ours.

Pure: prometheus_client families in, families, series or text out. Knows no registry, no Ray, no HTTP.

The one idea: an alias keeps some labels, renamed, and *sums* over the others; that is right for counters, for gauges that count
things, and for the cumulative samples of a histogram alike. What we do not count has no alias: a dashboard's empty panel is
better than a made-up figure. Names after vllm/v1/metrics/loggers.py and sglang/srt/metrics (collectors of scheduler and tokenizer).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

Compat = Literal["none", "vllm", "sglang"]
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Alias:
    """`source` under another name. Both are family names: a counter's without its `_total`.

    keep: labels of ours to keep beside the dialect's, with their new names. fixed: labels to add.
    """

    name: str
    source: str
    keep: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Share:
    """A gauge that we have as two counters: part / whole since the translator's last look that saw `whole` grow."""

    name: str
    text: str
    part: str
    whole: str


@dataclass(frozen=True)
class Constant:
    """A gauge with one value for each sample of `source`: something that never happens here, or always."""

    name: str
    text: str
    source: str
    value: float


@dataclass(frozen=True)
class Dialect:
    """Another engine's names. labels: of ours that all its samples keep, with their new names."""

    labels: Mapping[str, str]
    aliases: tuple[Alias, ...]
    shares: tuple[Share, ...] = ()
    constants: tuple[Constant, ...] = ()


# vLLM's `engine` is the index of an engine; here it is the replica that counted, ingress or scheduler.
VLLM = Dialect(
    labels={"model": "model_name", "replica": "engine"},
    aliases=(
        Alias("vllm:num_requests_running", "overlap_running_requests"),
        Alias("vllm:num_requests_waiting", "overlap_waiting_requests"),
        Alias("vllm:num_requests_waiting_by_reason", "overlap_waiting_requests", keep={"reason": "reason"}),
        Alias("vllm:kv_cache_usage_perc", "overlap_kv_usage_ratio"),
        Alias("vllm:prefix_cache_queries", "overlap_prefix_cache_queries"),
        Alias("vllm:prefix_cache_hits", "overlap_prefix_cache_hits"),
        Alias("vllm:num_preemptions", "overlap_preemptions"),
        Alias("vllm:prompt_tokens", "overlap_prompt_tokens"),
        Alias("vllm:prompt_tokens_cached", "overlap_prompt_tokens_cached"),
        Alias("vllm:generation_tokens", "overlap_generation_tokens"),
        Alias("vllm:request_success", "overlap_requests_finished", keep={"reason": "finished_reason"}),
        Alias("vllm:request_success", "overlap_requests_aborted", fixed={"finished_reason": "abort"}),
        Alias("vllm:request_success", "overlap_requests_failed", fixed={"finished_reason": "error"}),
        Alias("vllm:request_prompt_tokens", "overlap_request_prompt_tokens"),
        Alias("vllm:request_generation_tokens", "overlap_request_generation_tokens"),
        Alias("vllm:iteration_tokens_total", "overlap_step_tokens"),
        Alias("vllm:time_to_first_token_seconds", "overlap_time_to_first_token_seconds"),
        Alias("vllm:inter_token_latency_seconds", "overlap_inter_token_latency_seconds"),
        Alias("vllm:e2e_request_latency_seconds", "overlap_e2e_request_latency_seconds"),
        Alias("vllm:request_queue_time_seconds", "overlap_request_queue_time_seconds"),
        Alias("vllm:request_prefill_time_seconds", "overlap_request_prefill_time_seconds"),
        Alias("vllm:request_decode_time_seconds", "overlap_request_decode_time_seconds"),
    ),
)


def sglang(prefix: str) -> Dialect:
    """SGLang's names. prefix: "sglang:" as its servers have it, "sglang_" as Ray's dashboard for SGLang reads it."""
    return Dialect(
        labels={"model": "model_name", "replica": "replica"},
        aliases=tuple(
            Alias(prefix + name, source)
            for name, source in (
                ("num_running_reqs", "overlap_running_requests"),
                ("num_queue_reqs", "overlap_waiting_requests"),
                ("token_usage", "overlap_kv_usage_ratio"),
                ("prompt_tokens", "overlap_prompt_tokens"),
                ("generation_tokens", "overlap_generation_tokens"),
                ("cached_tokens", "overlap_prompt_tokens_cached"),
                ("num_requests", "overlap_requests_accepted"),
                ("num_aborted_requests", "overlap_requests_aborted"),
                ("prompt_tokens_histogram", "overlap_request_prompt_tokens"),
                ("generation_tokens_histogram", "overlap_request_generation_tokens"),
                ("time_to_first_token_seconds", "overlap_time_to_first_token_seconds"),
                ("inter_token_latency_seconds", "overlap_inter_token_latency_seconds"),
                ("e2e_request_latency_seconds", "overlap_e2e_request_latency_seconds"),
                ("queue_time_seconds", "overlap_request_queue_time_seconds"),
            )
        ),
        shares=(
            Share(
                prefix + "cache_hit_rate",
                "prompt tokens found in the prefix cache, of those looked up lately",
                "overlap_prefix_cache_hits",
                "overlap_prefix_cache_queries",
            ),
        ),
        constants=(
            Constant(prefix + "num_paused_reqs", "none: no request is ever paused", "overlap_running_requests", 0.0),
        ),
    )


class Translator:
    """Families of ours into a dialect's. Remembers the counters behind shares; a fresh one takes them since the process' start."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._shares: dict[tuple[str, Labels], tuple[float, float, float]] = {}  # part, whole, share as last reported

    def __call__(self, families: Iterable[Metric]) -> list[Metric]:
        """What of the dialect can be told from these families."""
        ours = {family.name: family for family in families}
        theirs: dict[str, Metric] = {}
        for alias in self._dialect.aliases:
            if source := ours.get(alias.source):
                family = theirs.setdefault(alias.name, Metric(alias.name, source.documentation, source.type))
                labels = {**self._dialect.labels, **alias.keep}
                for (suffix, kept), value in sums(source, labels).items():
                    family.add_sample(alias.name + suffix, {**dict(kept), **alias.fixed}, value)
        for constant in self._dialect.constants:
            if source := ours.get(constant.source):
                theirs[constant.name] = self._constant(constant, source)
        for share in self._dialect.shares:
            if share.part in ours and share.whole in ours:
                theirs[share.name] = self._share(share, ours[share.part], ours[share.whole])
        return list(theirs.values())

    def _constant(self, constant: Constant, source: Metric) -> Metric:
        family = Metric(constant.name, constant.text, "gauge")
        for _, labels in sums(source, self._dialect.labels):
            family.add_sample(constant.name, dict(labels), constant.value)
        return family

    def _share(self, share: Share, part: Metric, whole: Metric) -> Metric:
        family = Metric(share.name, share.text, "gauge")
        parts = sums(part, self._dialect.labels)
        for key, whole_now in sums(whole, self._dialect.labels).items():
            labels = key[1]
            part_now = parts.get(key, 0.0)
            part_before, whole_before, value = self._shares.get((share.name, labels), (0.0, 0.0, 0.0))
            if whole_now > whole_before:
                value = (part_now - part_before) / (whole_now - whole_before)
                self._shares[share.name, labels] = (part_now, whole_now, value)
            family.add_sample(share.name, dict(labels), value)
        return family


def sums(family: Metric, labels: Mapping[str, str]) -> dict[tuple[str, Labels], float]:
    """(sample suffix, kept labels under their new names) -> sum over all other labels. `le` is always kept."""
    totals: dict[tuple[str, Labels], float] = {}
    for sample in family.samples:
        suffix = sample.name.removeprefix(family.name)
        if suffix == "_created":
            continue
        kept = tuple(
            (labels.get(name, name), value) for name, value in sample.labels.items() if name in (*labels, "le")
        )
        totals[suffix, kept] = totals.get((suffix, kept), 0.0) + sample.value
    return totals


class Series(NamedTuple):
    """One sample of an exporter that knows only counters and gauges."""

    counter: bool
    name: str
    text: str
    labels: Labels
    value: float


def flatten(families: Iterable[Metric], more: Mapping[str, str]) -> Iterator[Series]:
    """Every sample as a series, with the labels `more` added. A histogram's are gauges NAME_bucket{le}, NAME_sum, NAME_count."""
    for family in families:
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                labels = (*sample.labels.items(), *more.items())
                yield Series(family.type == "counter", sample.name, family.documentation, labels, sample.value)


def parse(exposition: bytes) -> list[Metric]:
    """Families of a text in the Prometheus format."""
    return list(text_string_to_metric_families(exposition.decode()))


def with_names(exposition: bytes, compat: Compat) -> bytes:
    """A text in the Prometheus format with another engine's names added."""
    if compat == "none":
        return exposition
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Fixed(Translator(VLLM if compat == "vllm" else sglang("sglang:"))(parse(exposition))))
    return exposition + generate_latest(registry)


class _Fixed(Collector):
    """Families that were made elsewhere, for prometheus_client's writer."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
