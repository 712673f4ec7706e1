"""The picture of `gantt` as PNG. Imports matplotlib (extra `bench`); import it late."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from overlap_serve.bench.gantt import COLORS, STEPS_SHOWN
from overlap_serve.bench.timeline import LANES, Timeline


def save(timelines: Sequence[Timeline], file: Path, title: str) -> None:
    """Depth 0 above depth 1, one time scale."""
    figure = Figure(figsize=(12, 2.4 * len(timelines) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    figure.suptitle(title)
    for timeline, axes in zip(timelines, panels, strict=True):
        shown, shares = timeline.middle(STEPS_SHOWN), timeline.shares()
        for i, lane in enumerate(LANES):
            bars = [
                ((bar.begin - shown.begin) * 1e3, (bar.end - bar.begin) * 1e3)
                for bar in shown.bars()
                if bar.lane == lane
            ]
            axes.broken_barh(bars, (len(LANES) - 1 - i - 0.38, 0.76), facecolors=COLORS[lane])
        axes.set_yticks(range(len(LANES)), reversed(LANES))
        axes.set_title(
            f"depth {timeline.depth}: step {shares.step_ms:.2f} ms, host time hidden {shares.hidden:.0%}, "
            f"device idle {shares.idle:.0%}",
            loc="left",
            fontsize="medium",
        )
    panels[-1].set_xlabel("ms")
    figure.savefig(file)
