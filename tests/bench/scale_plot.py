"""The scale bench's plot: an SVG that needs nothing and reads on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 760, 330
_STYLE = """\
  text { font: 13px system-ui, sans-serif; fill: #333 }
  .title { font-weight: 600 }
  .grid { stroke: #8884; stroke-width: 1 }
  .ours { stroke: #0b6bcb; fill: #0b6bcb }
  .theirs { stroke: #c2410c; fill: #c2410c }
  .line { fill: none; stroke-width: 2.5 }
  .bound { stroke: #777; stroke-dasharray: 4 4; stroke-width: 1.5 }
  @media (prefers-color-scheme: dark) {
    text { fill: #ddd }
    .ours { stroke: #6cb6ff; fill: #6cb6ff }
    .theirs { stroke: #ff9a5c; fill: #ff9a5c }
    .bound { stroke: #aaa }
  }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One pair of axes, both logarithmic."""

    title: str
    ours: Sequence[tuple[float, float]]
    theirs: Sequence[tuple[float, float]]
    low: float
    high: float
    bound: float | None = None
    """A limit, drawn as a broken line."""


def plot(panels: Sequence[Panel], *, ours: str, theirs: str) -> str:
    """The SVG's text."""
    width = WIDTH / len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{"; ".join(panel.title for panel in panels)}">',
        f"<style>\n{_STYLE}</style>",
    ]
    for index, panel in enumerate(panels):
        parts += _panel(panel, left=index * width + 52, width=width - 72)
    for at, name, text in ((52, "ours", ours), (WIDTH / 2 + 20, "theirs", theirs)):
        parts.append(f'<circle class="{name}" cx="{at:.0f}" cy="{HEIGHT - 14}" r="5"/>')
        parts.append(f'<text x="{at + 12:.0f}" y="{HEIGHT - 10}">{text}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, *, left: float, width: float) -> list[str]:
    top, height = 40.0, HEIGHT - 120.0

    def x(nodes: float) -> float:
        return left + width * (math.log2(nodes) - 3) / 10

    def y(value: float) -> float:
        share = (math.log10(value) - math.log10(panel.low)) / (math.log10(panel.high) - math.log10(panel.low))
        return top + height * (1 - min(1.0, max(0.0, share)))

    parts = [f'<text class="title" x="{left:.0f}" y="22">{panel.title}</text>']
    value = panel.low
    while value <= panel.high * 1.001:
        parts.append(
            f'<line class="grid" x1="{left:.1f}" x2="{left + width:.1f}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        )
        parts.append(f'<text x="{left - 6:.1f}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
        value *= 10
    for nodes in (8, 64, 512, 1024, 8192):
        if nodes != 512:
            parts.append(f'<text x="{x(nodes):.1f}" y="{top + height + 20:.1f}" text-anchor="middle">{nodes}</text>')
    parts.append(f'<text x="{left + width / 2:.1f}" y="{top + height + 40:.1f}" text-anchor="middle">nodes</text>')
    if panel.bound is not None:
        at = y(panel.bound)
        parts.append(f'<line class="bound" x1="{left:.1f}" x2="{left + width:.1f}" y1="{at:.1f}" y2="{at:.1f}"/>')
    for name, points in (("ours", panel.ours), ("theirs", panel.theirs)):
        line = " ".join(f"{x(nodes):.1f},{y(value):.1f}" for nodes, value in points)
        parts.append(f'<polyline class="line {name}" points="{line}"/>')
        parts += [f'<circle class="{name}" cx="{x(n):.1f}" cy="{y(v):.1f}" r="3.5"/>' for n, v in points]
    return parts
