"""Pictures of a sweep. The only module of the package that imports matplotlib (extra `bench`); import it late."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from overlap_serve.bench.report import Point


def save(points: Sequence[Point], file: Path) -> None:
    """Four panels: the distributions of TTFT, gaps and latency per point, and throughput against load. Form by the file's suffix."""
    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    (ttft, gaps), (latency, throughput) = figure.subplots(2, 2)
    for point in points:
        good = [record for record in point.records if record.ok]
        _distribution(ttft, [record.ttft_s * 1e3 for record in good], point.name)
        _distribution(gaps, [gap * 1e3 for record in good for gap in record.gaps_s], point.name)
        _distribution(latency, [record.latency_s * 1e3 for record in good], point.name)
    for axes, title in ((ttft, "time to first token"), (gaps, "between chunks"), (latency, "end to end")):
        axes.set(
            title=title, xlabel="ms", ylabel="share of requests" if axes is not gaps else "share of gaps", ylim=(0, 1)
        )
        axes.legend(fontsize="small")
    gaps.set_xscale("symlog", linthresh=1)  # one long gap must not flatten all others
    names = [point.name for point in points]
    throughput.bar(names, [point.summary.output_tokens_per_s for point in points])
    throughput.set(title="throughput", ylabel="output tok/s")
    throughput.tick_params(axis="x", rotation=20)
    figure.savefig(file)


def _distribution(axes: Axes, values: list[float], name: str) -> None:
    ordered = sorted(values)
    shares = [(rank + 1) / len(ordered) for rank in range(len(ordered))]
    axes.step(ordered, shares, where="post", label=name)
