"""Results for people (tables) and programs (a dict for JSON). Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from overlap_serve.bench.load import Load
from overlap_serve.bench.stats import Record, Spread, Summary

SPREAD_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
MAX_REASONS = 3


@dataclass(frozen=True)
class Point:
    """One load of a sweep and what came of it."""

    load: Load
    summary: Summary
    records: Sequence[Record]

    @property
    def name(self) -> str:
        """Such as `rate 4, concurrency 16`; `all at once` without either."""
        parts = [] if math.isinf(self.load.rate) else [f"rate {self.load.rate:g}"]
        parts += [] if self.load.concurrency is None else [f"concurrency {self.load.concurrency}"]
        return ", ".join(parts) or "as it comes"


def point_text(point: Point) -> str:
    """One point in full."""
    summary = point.summary
    counts = [
        ("requests", f"{summary.ok} ok, {sum(summary.errors.values())} failed"),
        *((f"  {kind}", f"{count}   {_reasons(point, kind)}") for kind, count in summary.errors.items()),
        ("duration", f"{summary.duration_s:.2f} s, at most {summary.peak_concurrency} requests at once"),
        ("tokens", f"{summary.input_tokens} in, {summary.output_tokens} out"),
        ("throughput", _throughput(summary)),
    ]
    if summary.goodput_rps is not None:
        counts.append(("goodput", f"{summary.goodput_rps:.3f} requests/s within the limits"))
    lines = [f"== {point.name}", *(f"{name:<20}{value}".rstrip() for name, value in counts)]
    lines.append(f"{'ms':<20}" + "".join(f"{name:>10}" for name in SPREAD_COLUMNS))
    for name, spread in _spreads(summary).items():
        lines.append(f"{name:<20}" + "".join(f"{vars(spread)[column]:>10.2f}" for column in SPREAD_COLUMNS))
    return "\n".join(lines)


def sweep_table(points: Sequence[Point]) -> str:
    """One line per point."""
    head = ["rate", "conc", "ok", "failed", "req/s", "tok/s in", "tok/s out", "goodput"]
    head += [f"{name} {p}" for name in ("TTFT", "TPOT", "ITL", "E2E") for p in ("p50", "p99")]
    rows = [head, *(list(_cells(point)) for point in points)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)


def as_json(
    config: Mapping[str, object], points: Sequence[Point], versions: Mapping[str, str], date: str, with_records: bool
) -> dict[str, object]:
    """rate null: infinite. Records carry times relative to the first request of their point."""
    return {
        "tool": "overlap-serve bench serve",
        "date": date,
        "versions": dict(versions),
        "config": dict(config),
        "points": [_point_json(point, with_records) for point in points],
    }


def _point_json(point: Point, with_records: bool) -> dict[str, object]:
    load = point.load
    fields: dict[str, object] = {
        "rate": None if math.isinf(load.rate) else load.rate,
        "burstiness": None if math.isinf(load.burstiness) else load.burstiness,
        "concurrency": load.concurrency,
        **asdict(point.summary),
    }
    if with_records:
        zero_s = min((record.start_s for record in point.records), default=0.0)
        fields["records"] = [_record_json(record, zero_s) for record in point.records]
    return fields


def _record_json(record: Record, zero_s: float) -> dict[str, object]:
    return {
        "due_s": record.due_s - zero_s,
        "start_s": record.start_s - zero_s,
        "end_s": record.end_s - zero_s,
        "chunks_s": [stamp - zero_s for stamp in record.chunks_s],
        "input_tokens": record.input_tokens,
        "output_tokens": record.output_tokens,
        "error": record.error,
        "detail": record.detail,
    }


def _spreads(summary: Summary) -> dict[str, Spread]:
    return {
        "time to first token": summary.ttft_ms,
        "per output token": summary.tpot_ms,
        "between chunks": summary.itl_ms,
        "end to end": summary.e2el_ms,
        "sent late": summary.send_late_ms,
    }


def _throughput(summary: Summary) -> str:
    return (
        f"{summary.requests_per_s:.3f} requests/s, {summary.input_tokens_per_s:.1f} tok/s in, "
        f"{summary.output_tokens_per_s:.1f} tok/s out"
    )


def _reasons(point: Point, kind: str) -> str:
    seen = dict.fromkeys(record.detail for record in point.records if record.error == kind and record.detail)
    return "; ".join(list(seen)[:MAX_REASONS])


def _cells(point: Point) -> Iterator[str]:
    summary = point.summary
    yield "inf" if math.isinf(point.load.rate) else f"{point.load.rate:g}"
    yield "-" if point.load.concurrency is None else str(point.load.concurrency)
    yield str(summary.ok)
    yield str(sum(summary.errors.values()))
    yield f"{summary.requests_per_s:.2f}"
    yield f"{summary.input_tokens_per_s:.0f}"
    yield f"{summary.output_tokens_per_s:.0f}"
    yield "-" if summary.goodput_rps is None else f"{summary.goodput_rps:.2f}"
    for spread in (summary.ttft_ms, summary.tpot_ms, summary.itl_ms, summary.e2el_ms):
        yield f"{spread.p50:.1f}"
        yield f"{spread.p99:.1f}"
