"""`bench loop` and `bench offline`: what is counted, and what the commands print and write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from overlap_serve.bench import loop, offline
from overlap_serve.bench.drive import Recording
from overlap_serve.bench.offline import MINI_SGLANG, Shape
from overlap_serve.cli import build_parser, main
from overlap_serve.cli.bench_offline import shape_of
from overlap_serve.config import FakeModel, ServeConfig
from overlap_serve.errors import ConfigError, InvalidRequest
from overlap_serve.llm import LLM
from overlap_serve.runtime.trace import Round


def test_host_cost_is_what_the_marks_say() -> None:
    rounds = [Round(i, 2, t, t + 0.001, t + 0.003, t + 0.006, 0.010, t + 0.020) for i in range(8) for t in (i * 0.020,)]
    sends = [(i * 0.020 + 0.017, 0.001) for i in range(8)]
    cost = loop.cost_of(Recording(1, rounds, [], sends), 2)
    assert cost.steps == 5  # without the first two and the last
    parts = (cost.plan_ms, cost.launch_ms, cost.process_ms, cost.send_ms, cost.total_ms, cost.step_ms, cost.row_us)
    assert parts == pytest.approx((2, 3, 3, 1, 10, 20, 5000))


def test_both_depths_are_measured_in_turn() -> None:
    costs = loop.measure(3, device_s=0.0, steps=12, repeats=2)
    assert [cost.depth for cost in costs] == [0, 1, 0, 1]
    for cost in costs:
        assert cost.steps >= 8
        assert min(cost.plan_ms, cost.launch_ms, cost.process_ms, cost.send_ms) > 0
        assert cost.total_ms >= cost.plan_ms + cost.launch_ms + cost.process_ms + cost.send_ms


def test_the_loop_command_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "loop.json"
    assert main(f"bench loop --rows 1 5 --steps 12 --device-ms 0 --json {file}".split()) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5
    assert [(cost["rows"], cost["depth"]) for cost in json.loads(file.read_text())] == [(1, 0), (1, 1), (5, 0), (5, 1)]


def test_mini_sglangs_benchmark_is_256_requests_of_100_to_1024_tokens_each_way() -> None:
    prompts, sampling = MINI_SGLANG.draw(50_000)
    lengths = [len(ids) for ids in prompts]
    outputs = [one.max_tokens or 0 for one in sampling]
    for values in (lengths, outputs):
        assert len(values) == 256 and 100 <= min(values) < 150 and 970 < max(values) <= 1024
    assert max(map(max, prompts)) < 10_000
    assert all(one.ignore_eos and one.temperature == 0.6 for one in sampling)


def test_the_same_seed_draws_the_same() -> None:
    shape = Shape(4, (3, 9), (2, 5), 0.0, seed=7)
    assert shape.draw(100) == shape.draw(100)
    assert shape.draw(100) != Shape(4, (3, 9), (2, 5), 0.0, seed=8).draw(100)


def test_tokens_are_counted_after_the_warm_up() -> None:
    shape = Shape(5, (4, 8), (3, 6), 0.6)
    with LLM(ServeConfig(engine="fake", fake=FakeModel(base_ms=0))) as llm:
        runs = offline.measure(llm, shape, 2, progress=False)
        llm.check_at_rest()
    for run, seed in zip(runs, (1, 2), strict=True):
        prompts, sampling = Shape(5, (4, 8), (3, 6), 0.6, seed).draw(258)
        assert (run.prompts, run.input_tokens) == (5, sum(map(len, prompts)))
        assert run.output_tokens == sum(one.max_tokens or 0 for one in sampling)
        assert run.output_tokens_per_s == pytest.approx(run.output_tokens / run.seconds)
    assert runs[0].input_tokens != runs[1].input_tokens or runs[0].output_tokens != runs[1].output_tokens


def test_answers_cut_short_are_no_result() -> None:
    config = ServeConfig(engine="fake", fake=FakeModel(base_ms=0, max_model_len=32))
    with LLM(config) as llm, pytest.raises((ConfigError, InvalidRequest)):
        offline.measure(llm, Shape(2, (20, 20), (20, 20), 0.0), progress=False)


def test_the_offline_command_prints_tokens_per_second_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "offline.json"
    command = f"bench offline --engine fake --num-prompts 3 --input-len 4 8 --output-len 5 --json {file} --repeats 2"
    assert main([*command.split(), "--set", "fake={base_ms: 0}"]) == 0
    assert "output tok/s" in capsys.readouterr().out
    result = json.loads(file.read_text())
    assert [run["output_tokens"] for run in result["runs"]] == [15, 15]
    assert result["shape"]["input_len"] == [4, 8]


def test_a_preset_can_be_changed_in_parts() -> None:
    args = build_parser().parse_args("bench offline --preset mini-sglang --num-prompts 8 --output-len 10".split())
    assert shape_of(args) == Shape(8, (100, 1024), (10, 10), 0.6)


@pytest.mark.parametrize("lengths", ["9 4", "1 2 3"])
def test_lengths_are_one_number_or_a_range(lengths: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"bench offline --engine fake --input-len {lengths}".split()) == 2
    assert "--input-len" in capsys.readouterr().err
