"""Kept results: their form, figures that follow from their raw runs, and a README that quotes them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from benchmarks.results import FOLDER

FILES = sorted(FOLDER.glob("*.json"))
README = Path(__file__).parents[1] / "README.md"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_figures_follow_from_the_runs(file: Path) -> None:
    result = json.loads(file.read_text())
    assert set(result) == {"name", "command", "machine", "versions", "commit", "date", "runs", "figures"}
    assert result["name"] == file.stem
    made = importlib.import_module(f"benchmarks.{file.stem}").figures(result["runs"])
    assert {key: float(f"{value:.4g}") for key, value in made.items()} == result["figures"]


def test_readme_quotes_the_overlap_figures() -> None:
    figures = json.loads((FOLDER / "loop_overlap_cpu.json").read_text())["figures"]
    text = README.read_text()
    for prefix in ("", "embedded_"):
        row = [f"{figures[f'{prefix}step_ms_depth{depth}']:.1f} ms" for depth in (0, 1)]
        assert " | ".join(row) in text


def test_readme_quotes_the_host_cost_and_the_speed_on_a_cpu() -> None:
    cost, speed = (
        json.loads((FOLDER / f"{name}.json").read_text())["figures"] for name in ("loop_host_cost", "cpu_decode")
    )
    text = " ".join(README.read_text().split())
    assert (
        f"{cost['ms_per_step_256']:.2f} ms a step with 256 rows, {cost['ms_per_step_1024']:.2f} ms with 1,024" in text
    )
    ours, transformers, llamacpp = (
        [f"{speed[f'{side}_decode_{streams}_tok_s']:.0f}" for streams in (1, 16)]
        for side in ("ours", "transformers", "llamacpp")
    )
    assert f"makes {ours[0]} tokens a second for one stream and {ours[1]} for 16" in text
    assert f"transformers {' and '.join(transformers)}, llama.cpp {' and '.join(llamacpp)}" in text


def test_readme_quotes_latency_and_cold_start() -> None:
    load, start = (json.loads((FOLDER / f"{name}.json").read_text())["figures"] for name in ("http_load", "cold_start"))
    text = README.read_text()
    assert f"p50 {load['added_p50_ms']:.1f} ms, p99 {load['added_p99_ms']:.1f} ms, {load['errors']:.0f} errors" in text
    assert f"{start['first_token_s']:.1f} s (Ray is up after {start['ray_up_s']:.1f} s" in text
    assert f"{start['pss_ingress_mb']:.0f} MB, {start['pss_rank_mb']:.0f} MB, {start['pss_all_mb']:.0f} MB" in text
