"""`Timeline`: the lanes of the overlap story, from what a loop and its device recorded; and what they say in numbers.

    device compute            spans of the engine's stream, seen from the stream
    host receive + plan       also the launch
    host wait (sync point 2)  idle: waits for the device
    host process              tokens, ends, outputs, sends

Knows no loop and draws nothing; `gantt` and `timeline_png` draw it. A span of the device in which its stream was busy for a part only
(a CPU stream's thread that waited for the GIL) counts, and is drawn, by that part.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from overlap_serve.bench.drive import Recording
from overlap_serve.device.base import Span
from overlap_serve.runtime.trace import Round

DEVICE, PLAN, WAIT, PROCESS = "device compute", "host receive + plan", "host wait (sync point 2)", "host process"
LANES = (DEVICE, PLAN, WAIT, PROCESS)


class Bar(NamedTuple):
    """begin, end: seconds by time.monotonic. name: one of a lane's kinds."""

    lane: str
    name: str
    begin: float
    end: float
    step: int


@dataclass(frozen=True)
class Shares:
    """Of the steady part of a run. hidden: of the host's working time, what the device computed beside. idle: of the wall clock, what the
    device did not compute. host_ms, device_ms: of a step."""

    steps: int
    step_ms: float
    host_ms: float
    device_ms: float
    hidden: float
    idle: float


@dataclass(frozen=True)
class Timeline:
    """One run. rounds: steady ones, in order. spans: of the device, at least those of the same time."""

    depth: int
    rounds: list[Round]
    spans: list[Span]

    @classmethod
    def of(cls, run: Recording, rows: int) -> Timeline:
        """Raises ValueError if no steady steps were recorded."""
        return cls._cut(run.depth, run.steady(rows), run.spans)

    def middle(self, steps: int) -> Timeline:
        """`steps` rounds from the middle, for a picture."""
        first = max(0, (len(self.rounds) - steps) // 2)
        return Timeline._cut(self.depth, self.rounds[first : first + steps], self.spans)

    @classmethod
    def _cut(cls, depth: int, rounds: list[Round], spans: Sequence[Span]) -> Timeline:
        begin, end = rounds[0].begin, rounds[-1].end
        return cls(depth, rounds, [span for span in spans if span.end > begin and span.begin < end])

    @property
    def begin(self) -> float:
        return self.rounds[0].begin

    @property
    def end(self) -> float:
        return self.rounds[-1].end

    def shares(self) -> Shares:
        wall_s = self.end - self.begin
        host_s = sum(r.host_s for r in self.rounds)
        busy_s = sum(_overlap(span, self.begin, self.end) for span in self.spans)
        work = [(begin, end) for r in self.rounds for begin, end in ((r.begin, r.launched), (r.wait_end, r.end))]
        count = len(self.rounds)
        return Shares(
            steps=count,
            step_ms=wall_s * 1e3 / count,
            host_ms=host_s * 1e3 / count,
            device_ms=busy_s * 1e3 / count,
            hidden=_beside(work, self.spans) / host_s,
            idle=max(0.0, 1 - busy_s / wall_s),
        )

    def bars(self) -> Iterator[Bar]:
        """Of all lanes, cut to the rounds' time."""
        for r in self.rounds:
            yield Bar(PLAN, "receive", r.begin, r.planning, r.step)
            yield Bar(PLAN, "plan", r.planning, r.planned, r.step)
            yield Bar(PLAN, "launch", r.planned, r.launched, r.step)
            yield Bar(WAIT, "wait", r.launched, r.wait_end, r.step)
            yield Bar(PROCESS, "process", r.wait_end, r.end, r.step)
        for span in self.spans:
            begin, end = max(span.begin, self.begin), min(span.begin + span.busy_s, self.end)
            if end > begin:
                yield Bar(DEVICE, "compute", begin, end, -1)


def _overlap(span: Span, begin: float, end: float) -> float:
    """Busy seconds of the span in [begin, end), as if spread evenly over it."""
    length_s = span.end - span.begin
    common_s = min(span.end, end) - max(span.begin, begin)
    return common_s * span.busy_s / length_s if common_s > 0 and length_s > 0 else 0.0


def _beside(work: Sequence[tuple[float, float]], spans: Sequence[Span]) -> float:
    """Seconds of `work` in which the device was busy; both in order of time."""
    total_s, first = 0.0, 0
    for begin, end in work:
        while first < len(spans) and spans[first].end <= begin:
            first += 1
        for i in range(first, len(spans)):
            if spans[i].begin >= end:
                break
            total_s += _overlap(spans[i], begin, end)
    return total_s


def summary(timelines: Sequence[Timeline]) -> str:
    lines = ["depth  step ms  host ms  device ms  host time hidden  device idle"]
    for timeline in timelines:
        s = timeline.shares()
        lines.append(
            f"{timeline.depth:5}  {s.step_ms:7.2f}  {s.host_ms:7.2f}  {s.device_ms:9.2f}  {s.hidden:15.1%}  {s.idle:11.1%}"
        )
    return "\n".join(lines)


def chrome_json(timelines: Sequence[Timeline]) -> str:
    """For chrome://tracing and ui.perfetto.dev: a process for each depth, a thread for each lane; both begin at 0.

    Form: Trace Event Format (docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
    """
    events: list[dict[str, object]] = []
    for timeline in timelines:
        pid = timeline.depth
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"depth {timeline.depth}"}})
        for tid, lane in enumerate(LANES):
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}})
            events.append({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}})
        for bar in timeline.bars():
            event: dict[str, object] = {"ph": "X", "name": bar.name, "pid": pid, "tid": LANES.index(bar.lane)}
            event |= {"ts": (bar.begin - timeline.begin) * 1e6, "dur": (bar.end - bar.begin) * 1e6}
            events.append(event if bar.step < 0 else {**event, "args": {"step": bar.step}})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
