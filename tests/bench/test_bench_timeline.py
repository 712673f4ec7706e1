"""Timelines: shares and bars from known rounds and spans, the forms of the files, and real runs of both depths."""

from __future__ import annotations

import itertools
import json
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from overlap_serve.bench import gantt
from overlap_serve.bench.drive import Load, Recording
from overlap_serve.bench.timeline import DEVICE, LANES, PLAN, PROCESS, WAIT, Timeline, chrome_json, summary
from overlap_serve.bench.trace import record
from overlap_serve.cli import main
from overlap_serve.config import EngineSpec, FakeModel, HostFacts, ServeConfig, fake_facts, resolve
from overlap_serve.device.base import Span
from overlap_serve.device.thread import ThreadStream
from overlap_serve.errors import ConfigError
from overlap_serve.runtime.trace import LoopTrace, Round

ROWS = 4
STEP_S = 0.010


def serial(count: int = 10) -> Recording:
    """Steps of 10 ms: 1 receive, 1 plan, 1 launch, 5 wait, 2 process; the device computes for the 5 ms of the wait."""
    at = [100 + STEP_S * i for i in range(count)]
    rounds = [Round(i, ROWS, t, t + 0.001, t + 0.002, t + 0.003, 0.005, t + STEP_S) for i, t in enumerate(at)]
    return Recording(0, rounds, [Span(t + 0.003, t + 0.008, 0.005) for t in at], [])


def spec(**fields: object) -> EngineSpec:
    config = ServeConfig(engine="fake", fake=FakeModel(base_ms=1, max_model_len=256), kv_cache_tokens=8192)
    config = config.model_copy(update=fields)
    return resolve(config, fake_facts(config.fake), HostFacts(num_cpus=1, bf16=False, cuda=False), "")


def test_a_serial_run_hides_nothing_and_leaves_the_device_idle_while_the_host_works() -> None:
    shares = Timeline.of(serial(), ROWS).shares()
    assert (shares.hidden, shares.idle) == pytest.approx((0.0, 0.5))
    assert (shares.step_ms, shares.host_ms, shares.device_ms) == pytest.approx((10, 5, 5))


def test_host_work_beside_the_device_is_hidden() -> None:
    run = serial()
    always = Recording(1, run.rounds, [Span(100 + 0.001 * i, 100.001 + 0.001 * i, 0.001) for i in range(100)], [])
    shares = Timeline.of(always, ROWS).shares()
    assert shares.hidden == pytest.approx(1.0)
    assert shares.idle == pytest.approx(0.0, abs=1e-9)


def test_a_device_thread_that_waits_for_the_gil_is_idle() -> None:
    run = serial()
    half = [Span(span.begin, span.end, span.busy_s / 2) for span in run.spans]
    timeline = Timeline.of(Recording(0, run.rounds, half, []), ROWS)
    assert timeline.shares().idle == pytest.approx(0.75)
    assert [bar.end - bar.begin for bar in timeline.bars() if bar.lane == DEVICE][:3] == [pytest.approx(0.0025)] * 3


def test_only_steps_of_all_rows_count() -> None:
    run = serial(20)
    prefill = [Round(-1, 64, 90 + i, 91 + i, 91 + i, 91 + i, 0, 91 + i) for i in range(3)]
    timeline = Timeline.of(Recording(0, prefill + run.rounds, run.spans, []), ROWS)
    assert [r.step for r in timeline.rounds] == list(range(2, 19))
    with pytest.raises(ValueError, match="more steps"):
        Timeline.of(Recording(0, prefill, [], []), ROWS)


def test_bars_of_a_round_follow_each_other_in_their_lanes() -> None:
    bars = [bar for bar in Timeline.of(serial(), ROWS).bars() if bar.step == 3]
    names = [(bar.lane, bar.name) for bar in bars]
    assert names == [(PLAN, "receive"), (PLAN, "plan"), (PLAN, "launch"), (WAIT, "wait"), (PROCESS, "process")]
    assert all(a.end == pytest.approx(b.begin) for a, b in itertools.pairwise(bars))


def test_perfetto_gets_a_process_for_each_depth_and_a_named_thread_for_each_lane() -> None:
    run = serial()
    timelines = [Timeline.of(Recording(depth, run.rounds, run.spans, []), ROWS) for depth in (0, 1)]
    events = json.loads(chrome_json(timelines))["traceEvents"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads == {(depth, i): lane for depth in (0, 1) for i, lane in enumerate(LANES)}
    work = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    assert min(e["ts"] for e in work) == 0 and all(e["dur"] >= 0 for e in work)
    assert {e["name"] for e in work} == {"receive", "plan", "launch", "wait", "process", "compute"}


def test_the_page_needs_nothing_outside_it_and_shows_depth_0_above_depth_1() -> None:
    run = serial(40)
    timelines = [Timeline.of(Recording(depth, run.rounds, run.spans, []), ROWS) for depth in (0, 1)]
    page = gantt.page(timelines, "a <b> & c")
    assert "a &lt;b&gt; &amp; c" in page and "<script" not in page and "src=" not in page and "@import" not in page
    assert summary(timelines) in page
    picture = ET.fromstring(gantt.svg(timelines))
    texts = [(float(t.attrib["y"]), t.text or "") for t in picture.iter("{http://www.w3.org/2000/svg}text")]
    tops = [next(y for y, text in texts if text.startswith(f"depth {depth}:")) for depth in (0, 1)]
    assert tops[0] < tops[1]
    assert all(sum(text == lane for _, text in texts) == 2 for lane in LANES)
    rects = picture.findall("{http://www.w3.org/2000/svg}rect")
    assert all(190 <= float(r.attrib["x"]) <= 1190.01 for r in rects) and len(rects) > 2 * 8 * 5


def test_a_run_of_both_depths_is_recorded_from_loop_and_device() -> None:
    timelines = record(spec(), Load(ROWS, 16, 24))
    assert [t.depth for t in timelines] == [0, 1]
    for timeline in timelines:
        assert len(timeline.rounds) >= 20
        assert timeline.shares().device_ms == pytest.approx(1.0, rel=0.5)
        assert all(r.begin <= r.planning <= r.planned <= r.launched <= r.wait_end <= r.end for r in timeline.rounds)
    serially, overlapped = (t.shares() for t in timelines)
    assert overlapped.hidden > serially.hidden


@pytest.mark.parametrize(
    ("load", "message"),
    [(Load(10_000, 16, 8), "at most"), (Load(2, 200, 100), "max_model_len")],
    ids=["rows", "length"],
)
def test_a_load_without_room_is_refused_before_anything_runs(load: Load, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        record(spec(), load)


def test_the_rings_keep_the_newest() -> None:
    trace = LoopTrace(capacity=8)
    for r in serial(20).rounds:
        trace.add_round(r)
    for i in range(100):
        trace.add_span(Span(i, i + 1, 1))
    assert [r.step for r in trace.rounds] == list(range(12, 20))
    assert [span.begin for span in trace.spans] == list(range(68, 100))


def test_recording_costs_less_than_a_hundredth_of_a_step_of_5_ms() -> None:
    """Of CPU time, so that other processes do not matter; a step has one round and at most three spans."""
    trace = LoopTrace()
    count = 2000
    begin = time.thread_time()
    for i in range(count):
        trace.add_round(Round(i, ROWS, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
        for _ in range(3):
            trace.add_span(Span(time.monotonic(), time.monotonic(), 0.0))
    assert (time.thread_time() - begin) / count < 0.01 * 0.005


def test_a_stream_tells_of_work_only_while_somebody_watches() -> None:
    stream = ThreadStream("engine")
    spans: list[Span] = []
    for watch in (None, spans.append, None):
        stream.record().synchronize()
        stream.watch(watch)
        stream.launch(lambda: None)
    stream.record().synchronize()
    stream.close()
    assert len(spans) == 1 and spans[0].begin <= spans[0].end and spans[0].busy_s <= spans[0].end - spans[0].begin


def test_the_command_writes_page_and_events_and_prints_the_shares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "trace --engine fake --rows 4 --steps 24 --host-ms 0.5 --set fake={base_ms:\\ 1}".replace("\\ ", " ")
    head, value = arguments.rsplit(" --set ", 1)
    assert main([*head.split(), "--set", value, "--output", str(tmp_path / "t")]) == 0
    assert "host time hidden" in capsys.readouterr().out
    assert (tmp_path / "t.html").read_text().startswith("<!doctype html>")
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
