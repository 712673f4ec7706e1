"""Statistics of synthetic timelines, against numbers worked out by hand and against numpy."""

from __future__ import annotations

import random

import numpy as np
import pytest

from overlap_serve.bench.stats import Record, meets, parse_slo, peak_concurrency, percentile, spread_ms, summarize
from overlap_serve.errors import InvalidRequest


def record(
    start: float, *chunks: float, tokens: int | None = None, end: float | None = None, error: str = ""
) -> Record:
    """chunks: seconds after the start."""
    stamps = [start + chunk for chunk in chunks]
    last = start if not stamps else stamps[-1]
    return Record(start, start, end or last, stamps, 10, len(chunks) if tokens is None else tokens, error)


def test_percentiles_are_numpys() -> None:
    rng = random.Random(1)
    for count in (1, 2, 3, 10, 101, 1000):
        values = sorted(rng.expovariate(1) for _ in range(count))
        for percent in (0, 1, 50, 90, 95, 99, 99.9, 100):
            assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), rel=1e-12)


def test_one_request_by_hand() -> None:
    """Sent at 100 s; 4 chunks at 0.2, 0.3, 0.5, 0.6 s; the stream closes at 0.9 s, which is nobody's latency."""
    one = record(100.0, 0.2, 0.3, 0.5, 0.6, end=100.9)
    assert one.ttft_s == pytest.approx(0.2)
    assert one.latency_s == pytest.approx(0.6)
    assert one.tpot_s == pytest.approx((0.6 - 0.2) / 3)
    assert one.gaps_s == pytest.approx([0.1, 0.2, 0.1])


def test_tpot_divides_by_tokens_and_gaps_are_between_chunks() -> None:
    """3 chunks that carry 9 tokens, as with speculative decoding or merged events: the definitions part here."""
    one = record(0.0, 0.1, 0.5, 0.9, tokens=9)
    assert one.tpot_s == pytest.approx(0.8 / 8)
    assert one.gaps_s == pytest.approx([0.4, 0.4])


def test_summary_by_hand() -> None:
    records = [
        record(0.0, 0.1, 0.2, 0.3),
        record(0.5, 0.3, 0.5, 0.7),
        record(1.0, 0.4),  # one token: no TPOT, no gap
        record(1.0, error="http_429"),
        record(1.1, 0.1, error="disconnected"),
        record(1.2, error="http_429"),
    ]
    made = summarize(records, 2.0, {})
    assert (made.ok, made.errors) == (3, {"disconnected": 1, "http_429": 2})
    assert (made.input_tokens, made.output_tokens) == (30, 7)
    assert (made.requests_per_s, made.input_tokens_per_s, made.output_tokens_per_s) == (1.5, 15.0, 3.5)
    assert made.ttft_ms.count == 3
    assert made.ttft_ms.mean == pytest.approx(800 / 3)
    assert made.ttft_ms.p50 == pytest.approx(300)
    assert made.ttft_ms.p90 == pytest.approx(380)
    assert [made.tpot_ms.count, made.tpot_ms.mean] == pytest.approx([2, 150])
    assert [made.itl_ms.count, made.itl_ms.p50, made.itl_ms.max] == pytest.approx([4, 150, 200])
    assert made.e2el_ms.max == pytest.approx(700)
    assert made.goodput_rps is None


def test_a_run_without_success_has_zeros() -> None:
    made = summarize([record(0.0, error="connect")], 1.0, {"ttft": 1.0})
    assert (made.ok, made.errors, made.goodput_rps, made.ttft_ms.count, made.ttft_ms.p99) == (
        0,
        {"connect": 1},
        0,
        0,
        0,
    )


def test_goodput_needs_every_limit_and_equality_meets_it() -> None:
    slo = parse_slo(["ttft:250", "tpot:125", "e2el:1000"])
    assert slo == {"ttft": 250.0, "tpot": 125.0, "e2el": 1000.0}
    both = record(0.0, 0.25, 0.375)  # exact in binary
    late_first = record(0.0, 0.3, 0.31)
    slow = record(0.0, 0.1, 0.3)
    one_token = record(0.0, 0.2)
    endless = record(0.0, 0.1, *(0.1 + 0.1 * i for i in range(1, 12)))
    failed = record(0.0, 0.1, error="timeout")
    assert [meets(r, slo) for r in (both, late_first, slow, one_token, endless)] == [True, False, False, True, False]
    made = summarize([both, late_first, slow, one_token, endless, failed], 4.0, slo)
    assert made.goodput_rps == 0.5


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:x", "itl:5", "ttft:-1", "tpot:nan", ""])
def test_a_wrong_limit_is_named(text: str) -> None:
    with pytest.raises(InvalidRequest, match="METRIC:MILLISECONDS"):
        parse_slo([text])


def test_peak_counts_open_requests_and_a_successor_does_not_meet_its_predecessor() -> None:
    spans = [(0.0, 1.0), (0.5, 2.0), (1.0, 3.0), (2.5, 2.6)]
    records = [Record(a, a, b, (), 0, 0) for a, b in spans]
    assert peak_concurrency(records) == 2
    assert peak_concurrency([]) == 0


def test_send_lateness_is_against_the_schedule() -> None:
    late = Record(1.0, 1.004, 2.0, (1.5,), 1, 1)
    assert summarize([late], 1.0, {}).send_late_ms.max == pytest.approx(4)


def test_spread_takes_any_order() -> None:
    made = spread_ms([0.003, 0.001, 0.002])
    assert [made.count, made.mean, made.p50, made.max] == pytest.approx([3, 2, 2, 3])
