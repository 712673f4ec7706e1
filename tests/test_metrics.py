"""Every name of the metrics table, and merging of processes."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from overlap_serve.metrics import (
    DetokenizerMetrics,
    IngressMetrics,
    SchedulerMetrics,
    TransportMetrics,
    build_info,
    merge,
    snapshot,
)


def scheduler_snapshot(replica: str, tokens: int) -> bytes:
    registry = CollectorRegistry()
    metrics = SchedulerMetrics(registry, "m", replica)
    metrics.generation_tokens.inc(tokens)
    metrics.step_s["plan"].observe(0.001)
    return snapshot(registry)


def test_merge_keeps_one_family_with_the_samples_of_all() -> None:
    text = merge([scheduler_snapshot("a", 3), scheduler_snapshot("b", 4)]).decode()
    assert text.count("# TYPE overlap_generation_tokens_total") == 1
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = {
        s.labels["replica"]: s.value for s in families["overlap_generation_tokens"].samples if s.name.endswith("_total")
    }
    assert samples == {"a": 3.0, "b": 4.0}


def test_every_name_of_the_table_is_there_and_none_has_a_colon() -> None:
    registry = CollectorRegistry()
    SchedulerMetrics(registry, "m", "s")
    ingress = IngressMetrics(registry, "m", "i")
    DetokenizerMetrics(registry, "d")
    transport = TransportMetrics(registry, "t")
    build_info(registry, "i")
    ingress.rejected("queue_full")
    ingress.finished("stop")
    ingress.aborted("client")
    ingress.failed("engine_failed")
    ingress.ignored("other")
    ingress.tokens(3, 4, "stop")
    transport.sent("x", 1)
    transport.dropped("x", 1)
    names = {line.split("{")[0].split(" ")[0] for line in snapshot(registry).decode().splitlines() if line[:1] != "#"}
    wanted = """
        requests_accepted_total requests_rejected_total requests_finished_total requests_aborted_total requests_failed_total
        requests_migrated_total ignored_request_fields_total open_requests time_to_first_token_seconds_bucket
        inter_token_latency_seconds_bucket e2e_request_latency_seconds_bucket request_prompt_tokens_bucket
        request_generation_tokens_bucket running_requests waiting_requests request_queue_time_seconds_bucket
        request_prefill_time_seconds_bucket request_decode_time_seconds_bucket prompt_tokens_total prompt_tokens_cached_total
        generation_tokens_total discarded_tokens_total kv_pages kv_usage_ratio prefix_cache_queries_total
        prefix_cache_hits_total preemptions_total step_seconds_bucket step_tokens_bucket host_hidden_ratio device_idle_ratio
        last_step_age_seconds depth detokenizer_open_streams transport_messages_total transport_dropped_total
        transport_refused_total detokenizer_late_outputs_total late_deltas_total build_info
    """.split()
    assert {f"overlap_{name}" for name in wanted} <= names
    assert not any(":" in name or name.endswith("_created") for name in names)
