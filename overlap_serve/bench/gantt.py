"""The picture of two timelines as one HTML file without anything outside it: inline SVG, depth 0 above depth 1, one time scale."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from overlap_serve.bench.timeline import DEVICE, LANES, PLAN, PROCESS, WAIT, Shares, Timeline, summary

COLORS = {DEVICE: "#3b7dd8", PLAN: "#e39b2d", WAIT: "#d5d8dc", PROCESS: "#4aa564"}
LABEL_WIDTH, WIDTH, LANE_HEIGHT, BAR_HEIGHT, TITLE_HEIGHT = 190, 1000, 26, 20, 34
STEPS_SHOWN = 8
MIN_BAR = 0.4  # px; thinner ones would vanish

STYLE = (
    "body{font:14px sans-serif;margin:24px;max-width:1240px}svg{width:100%}text{font:12px sans-serif}"
    "pre{background:#f4f5f7;padding:12px}"
)


def page(timelines: Sequence[Timeline], title: str) -> str:
    """Numbers are of the whole of each timeline, drawn are some steps from its middle."""
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"
        f"<h1>{html.escape(title)}</h1>{svg(timelines)}<pre>{html.escape(summary(timelines))}</pre></html>\n"
    )


def svg(timelines: Sequence[Timeline]) -> str:
    height = _height() * len(timelines) + 24
    shown = [t.middle(STEPS_SHOWN) for t in timelines]
    longest_s = max(t.end - t.begin for t in shown)
    parts: list[str] = []
    for i, (whole, part) in enumerate(zip(timelines, shown, strict=True)):
        parts += _panel(part, whole.shares(), i * _height(), WIDTH / longest_s)
    parts += _axis(height - 24, longest_s)
    body = "".join(parts)
    return f'<svg viewBox="0 0 {LABEL_WIDTH + WIDTH + 10} {height}" xmlns="http://www.w3.org/2000/svg" role="img">{body}</svg>'


def _height() -> int:
    return TITLE_HEIGHT + LANE_HEIGHT * len(LANES) + 8


def _panel(timeline: Timeline, shares: Shares, top: float, scale: float) -> Iterator[str]:
    """scale: px per second."""
    heading = f"depth {timeline.depth}: step {shares.step_ms:.2f} ms, host time hidden {shares.hidden:.0%}, device idle {shares.idle:.0%}"
    yield f'<text x="0" y="{top + 22}" font-weight="bold">{heading}</text>'
    for i, lane in enumerate(LANES):
        y = top + TITLE_HEIGHT + i * LANE_HEIGHT
        yield f'<text x="0" y="{y + 14}">{lane}</text>'
        yield f'<line x1="{LABEL_WIDTH}" x2="{LABEL_WIDTH + WIDTH}" y1="{y + BAR_HEIGHT + 2}" y2="{y + BAR_HEIGHT + 2}" stroke="#eee"/>'
    for bar in timeline.bars():
        x = LABEL_WIDTH + (bar.begin - timeline.begin) * scale
        y = top + TITLE_HEIGHT + LANES.index(bar.lane) * LANE_HEIGHT
        width = max(MIN_BAR, (bar.end - bar.begin) * scale)
        told = f"{bar.name} {(bar.end - bar.begin) * 1e3:.3f} ms" + (f", step {bar.step}" if bar.step >= 0 else "")
        yield (
            f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{BAR_HEIGHT}" fill="{COLORS[bar.lane]}"><title>{told}</title></rect>'
        )


def _axis(top: float, longest_s: float) -> Iterator[str]:
    """Ten ticks, in ms from the beginning of each panel."""
    for i in range(11):
        x = LABEL_WIDTH + WIDTH * i / 10
        yield f'<text x="{x:.1f}" y="{top + 16}" text-anchor="middle" fill="#666">{longest_s * 100 * i:.1f}</text>'
    yield f'<text x="0" y="{top + 16}" fill="#666">ms</text>'
