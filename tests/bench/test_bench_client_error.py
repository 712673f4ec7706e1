"""The kept measurement of the client's own lateness, and what is said about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.client_error import GAP_S, PATTERNS, figures, one_run
from benchmarks.results import FOLDER

DOCUMENT = Path(__file__).parents[2] / "docs" / "benchmarking.md"
LIMIT_MS = 2.0


def run(late_s: float, pattern: str = "burst", period_s: float = GAP_S) -> dict[str, object]:
    """98 events of one stream late by 1 ms, two by late_s."""
    sent = [step * period_s for step in range(100)]
    return one_run(pattern, [sent], [[clock + (late_s if step > 97 else 0.001) for step, clock in enumerate(sent)]])


def test_figures_are_medians_of_quiet_runs() -> None:
    unquiet = run(0.9, period_s=2 * GAP_S)  # the server woke late itself
    made = figures([run(0.005), unquiet, run(0.003, "spread"), run(0.004), run(0.009)])
    assert (made["runs"], made["quiet_runs"]) == (5, 4)
    assert made["burst_p50_ms"] == pytest.approx(1.0, abs=0.011)
    assert made["burst_p999_ms"] == pytest.approx(5.0, abs=0.011)
    assert made["burst_max_ms"] == pytest.approx(9.0)
    assert made["burst_all_p99_ms"] > made["burst_p50_ms"]
    assert made["spread_p999_ms"] == pytest.approx(3.0, abs=0.011)


def test_the_kept_result_is_within_the_limit_at_the_full_load_and_quoted() -> None:
    result = json.loads((FOLDER / "client_error.json").read_text())
    for kept in result["runs"]:
        assert kept["streams"] == 64
        assert kept["events_per_s"] == pytest.approx(6400, rel=0.02)
        assert sum(kept["late_bins"].values()) == kept["events"] == 64 * 500
    text = DOCUMENT.read_text()
    for pattern in PATTERNS:
        values = [result["figures"][f"{pattern}_{name}_ms"] for name in ("p50", "p99", "p999", "max")]
        assert values[1] <= LIMIT_MS
        assert f"{result['figures'][f'{pattern}_all_p99_ms']:.2f} ms" in text
        assert " | ".join(f"{value:.2f}" for value in values) in text
