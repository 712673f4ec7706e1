"""What a run comes to: latencies, throughput, goodput, errors by kind. Pure functions of records.

The definitions are those of `vllm bench serve` (vllm/benchmarks/serve.py, calculate_metrics; docs/benchmarking.md names each).
Times are seconds of one clock, results milliseconds.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from overlap_serve.errors import InvalidRequest

PERCENTILES = (50, 90, 95, 99)
SLO_METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class Record:
    """One request, over.

    due_s: when the load wanted it sent. start_s: when it was, a new connection included. end_s: when nothing more came.
    chunks_s: arrival of every chunk with choices. error: kind and detail, both empty when it went well.
    """

    due_s: float
    start_s: float
    end_s: float
    chunks_s: Sequence[float]
    input_tokens: int
    output_tokens: int
    error: str = ""
    detail: str = ""

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def ttft_s(self) -> float:
        return self.chunks_s[0] - self.start_s

    @property
    def latency_s(self) -> float:
        """To the last chunk with choices, not to the end of the stream."""
        return self.chunks_s[-1] - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """None for one token, which has no time after the first."""
        if self.output_tokens <= 1:
            return None
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.chunks_s)]


@dataclass(frozen=True)
class Spread:
    """A distribution in milliseconds; count 0: all others are 0 too."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True)
class Summary:
    """goodput_rps is None without an SLO. send_late_ms: how late the client itself sent, against its schedule."""

    duration_s: float
    ok: int
    errors: Mapping[str, int]
    input_tokens: int
    output_tokens: int
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    goodput_rps: float | None
    peak_concurrency: int
    ttft_ms: Spread
    tpot_ms: Spread
    itl_ms: Spread
    e2el_ms: Spread
    send_late_ms: Spread


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear between the closest ranks, as numpy's default. ordered: ascending, not empty."""
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def spread_ms(values_s: Iterable[float]) -> Spread:
    ordered = sorted(value * 1e3 for value in values_s)
    if not ordered:
        return Spread(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    p50, p90, p95, p99 = (percentile(ordered, percent) for percent in PERCENTILES)
    return Spread(len(ordered), math.fsum(ordered) / len(ordered), p50, p90, p95, p99, ordered[-1])


def parse_slo(items: Iterable[str]) -> dict[str, float]:
    """["ttft:200", "tpot:50"] -> milliseconds by metric. Raises InvalidRequest."""
    slo: dict[str, float] = {}
    for item in items:
        name, _, value = item.partition(":")
        try:
            limit_ms = float(value)
        except ValueError:
            limit_ms = math.nan
        if name not in SLO_METRICS or not limit_ms >= 0:
            allowed = ", ".join(SLO_METRICS)
            raise InvalidRequest(
                f"--goodput {item}: write METRIC:MILLISECONDS with one of {allowed}, as in ttft:200 tpot:50"
            )
        slo[name] = limit_ms
    return slo


def meets(record: Record, slo_ms: Mapping[str, float]) -> bool:
    """A limit is met by equality. One token has a TPOT of 0 here, as in vLLM."""
    values_s = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.latency_s}
    return all(values_s[name] <= limit / 1e3 for name, limit in slo_ms.items())


def peak_concurrency(records: Iterable[Record]) -> int:
    """Most requests open at once. A request that begins as another ends does not meet it."""
    events = [event for r in records for event in ((r.start_s, 1), (r.end_s, -1))]
    return max(itertools.accumulate((step for _, step in sorted(events)), initial=0), default=0)


def summarize(records: Sequence[Record], duration_s: float, slo_ms: Mapping[str, float]) -> Summary:
    """duration_s: from the start of the load to the end of its last request. Failed requests count in `errors` alone."""
    good = [record for record in records if record.ok]
    input_tokens = sum(record.input_tokens for record in good)
    output_tokens = sum(record.output_tokens for record in good)
    return Summary(
        duration_s=duration_s,
        ok=len(good),
        errors=dict(sorted(Counter(record.error for record in records if not record.ok).items())),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        requests_per_s=len(good) / duration_s,
        input_tokens_per_s=input_tokens / duration_s,
        output_tokens_per_s=output_tokens / duration_s,
        goodput_rps=sum(meets(record, slo_ms) for record in good) / duration_s if slo_ms else None,
        peak_concurrency=peak_concurrency(records),
        ttft_ms=spread_ms(record.ttft_s for record in good),
        tpot_ms=spread_ms(tpot for record in good if (tpot := record.tpot_s) is not None),
        itl_ms=spread_ms(gap for record in good for gap in record.gaps_s),
        e2el_ms=spread_ms(record.latency_s for record in good),
        send_late_ms=spread_ms(record.start_s - record.due_s for record in records),
    )
