"""Our metrics under other names: every name that Ray's dashboard reads, sums over dropped labels, flat series."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Metric

from overlap_serve.metrics import IngressMetrics, SchedulerMetrics, merge, snapshot
from overlap_serve.runtime.metric_names import VLLM, Compat, Translator, flatten, parse, sglang, with_names
from tests.http_rig import MODEL, http_rig


def scheduler_text(replica: str, queries: int = 0, hits: int = 0) -> bytes:
    registry = CollectorRegistry()
    metrics = SchedulerMetrics(registry, "m", replica)
    metrics.prefix_queries.inc(queries)
    metrics.prefix_hits.inc(hits)
    metrics.generation_tokens.inc(7)
    metrics.running.set(3)
    metrics.waiting["queue"].set(4)
    metrics.waiting["capacity"].set(5)
    metrics.queue_time.observe(0.2)
    return snapshot(registry)


def ingress_text(replica: str = "i") -> bytes:
    registry = CollectorRegistry()
    metrics = IngressMetrics(registry, "m", replica)
    metrics.accepted.inc(4)
    metrics.finished("stop")
    metrics.finished("length")
    metrics.aborted("client")
    metrics.aborted("deadline")
    metrics.failed("engine_failed")
    metrics.tokens(10, 20, "stop")
    metrics.tokens(10, 2000, "abort")
    metrics.ttft.observe(0.2)
    return snapshot(registry)


def samples(families: list[Metric], name: str) -> dict[tuple[tuple[str, str], ...], float]:
    """Labels, sorted -> value."""
    return {
        tuple(sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
        if sample.name == name
    }


def test_labels_that_a_dialect_lacks_are_summed() -> None:
    families = Translator(VLLM)(parse(scheduler_text("s")))
    here = (("engine", "s"), ("model_name", "m"))
    assert samples(families, "vllm:num_requests_waiting") == {here: 9.0}
    by_reason = {
        dict(labels)["reason"]: value
        for labels, value in samples(families, "vllm:num_requests_waiting_by_reason").items()
    }
    assert by_reason == {"queue": 4.0, "capacity": 5.0, "prefix": 0.0}
    assert samples(families, "vllm:generation_tokens_total") == {here: 7.0}


def test_replicas_stay_apart() -> None:
    families = Translator(VLLM)(parse(merge([scheduler_text("a"), scheduler_text("b")])))
    assert {dict(labels)["engine"] for labels in samples(families, "vllm:num_requests_running")} == {"a", "b"}


def test_every_end_of_a_request_is_in_vllms_one_counter() -> None:
    ends = samples(Translator(VLLM)(parse(ingress_text())), "vllm:request_success_total")
    assert {dict(labels)["finished_reason"]: value for labels, value in ends.items()} == {
        "stop": 1.0,
        "length": 1.0,
        "abort": 2.0,
        "error": 1.0,
    }


def test_a_histogram_keeps_its_buckets_in_order_when_labels_are_summed() -> None:
    families = {family.name: family for family in Translator(VLLM)(parse(ingress_text()))}
    lengths = families["vllm:request_generation_tokens"]
    buckets = [sample for sample in lengths.samples if sample.name.endswith("_bucket")]
    bounds = [float(sample.labels["le"]) for sample in buckets]
    assert bounds == sorted(set(bounds))
    assert {sample.labels["le"]: sample.value for sample in buckets}["32.0"] == 1.0
    assert buckets[-1].value == 2.0
    assert samples([lengths], "vllm:request_generation_tokens_sum") == {(("engine", "i"), ("model_name", "m")): 2020.0}


@pytest.mark.parametrize(("compat", "prefix"), [("vllm", "vllm:"), ("sglang", "sglang:")])
def test_names_are_added_to_the_text_and_ours_stay(compat: Compat, prefix: str) -> None:
    ours = merge([ingress_text(), scheduler_text("s")])
    text = with_names(ours, compat)
    assert text.startswith(ours)
    families = parse(text)
    added = {family.name for family in families if family.name.startswith(prefix)}
    dialect = VLLM if compat == "vllm" else sglang("sglang:")
    wanted = {alias.name for alias in dialect.aliases} | {share.name for share in dialect.shares}
    assert added == wanted | {constant.name for constant in dialect.constants}
    assert len({family.name for family in families}) == len(families), "a family comes twice"
    assert with_names(ours, "none") == ours


def test_every_alias_has_a_source() -> None:
    """A metric that is renamed must not lose its aliases in silence."""
    ours = {family.name for family in parse(merge([ingress_text(), scheduler_text("s")]))}
    for dialect in (VLLM, sglang("sglang_")):
        assert {alias.source for alias in dialect.aliases} <= ours


def test_a_share_follows_the_latest_traffic_and_holds_while_there_is_none() -> None:
    translate = Translator(sglang("sglang_"))

    def rate(queries: int, hits: int) -> float:
        (value,) = samples(translate(parse(scheduler_text("s", queries, hits))), "sglang_cache_hit_rate").values()
        return value

    assert rate(0, 0) == 0.0
    assert rate(100, 50) == 0.5
    assert rate(200, 150) == 1.0  # of the last 100
    assert rate(200, 150) == 1.0  # nothing was looked up
    assert rate(300, 150) == 0.0


def test_flat_series_carry_every_sample_once() -> None:
    series = list(flatten(parse(scheduler_text("s")), {"deployment": "Scheduler"}))
    keys = [(one.name, one.labels) for one in series]
    assert len(set(keys)) == len(keys)
    kinds = {one.name: one.counter for one in series}
    assert kinds["overlap_generation_tokens_total"] and not kinds["overlap_running_requests"]
    # Ray's own histogram would rebuild observations from bucket midpoints; gauges keep the counts exact.
    assert not kinds["overlap_request_queue_time_seconds_bucket"]
    assert {"overlap_request_queue_time_seconds_sum", "overlap_request_queue_time_seconds_count"} <= set(kinds)
    assert all(("deployment", "Scheduler") in one.labels for one in series)
    assert not any(":" in one.name or one.name.endswith("_created") for one in series)


def test_metrics_compat_shows_on_the_metrics_route() -> None:
    with http_rig(metrics_compat="vllm") as rig, rig.http() as http:
        http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 3}).raise_for_status()
        lines = http.get("/metrics").text.splitlines()
    finished = [line for line in lines if line.startswith("vllm:request_success_total") and '"length"' in line]
    assert [line.rsplit(" ", 1)[1] for line in finished] == ["1.0"]
    assert any(line.startswith("overlap_requests_finished_total") for line in lines)
