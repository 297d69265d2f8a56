"""Curves as an SVG for light and dark backgrounds, without a library: a few lines, labels and logarithms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

_PANEL_WIDTH, _HEIGHT = 250, 320
_LEFT, _TOP, _BOTTOM, _GAP, _LEGEND_WIDTH = 50, 40, 40, 30, 150
_COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d")
"""Colours with a contrast of 3 : 1 or more against white and against black."""


class Panel(NamedTuple):
    """Labelled points from left to right, with the value of each curve."""

    title: str
    points: Sequence[tuple[str, Mapping[str, float]]]


def draw_panels(path: Path, unit: str, panels: Sequence[Panel]) -> None:
    """Write panels side by side, on one logarithmic scale."""
    figures = [figure for panel in panels for _, curves in panel.points for figure in curves.values()]
    low, high = math.floor(math.log10(min(figures))), math.ceil(math.log10(max(figures)))
    names = list(panels[0].points[0][1])
    width = _LEFT + len(panels) * (_PANEL_WIDTH + _GAP) + _LEGEND_WIDTH
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT}" width="{width}" height="{_HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="#6b7280" role="img">',
        f"<title>{escape(unit)}</title>",
        f'<text x="4" y="16">{escape(unit)}</text>',
    ]

    def y_of(figure: float) -> float:
        share = (math.log10(figure) - low) / (high - low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    for number, panel in enumerate(panels):
        left = _LEFT + number * (_PANEL_WIDTH + _GAP)
        for power in range(low, high + 1):
            y = y_of(10.0**power)
            lines.append(f'<path d="M{left} {y:.1f}h{_PANEL_WIDTH}" stroke="#9ca3af" stroke-opacity=".4"/>')
            if number == 0:
                lines.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
        step = _PANEL_WIDTH / len(panel.points)
        xs = [left + step * (place + 0.5) for place in range(len(panel.points))]
        for x, (label, _) in zip(xs, panel.points, strict=True):
            lines.append(f'<text x="{x:.1f}" y="{_HEIGHT - 22}" text-anchor="middle">{escape(label)}</text>')
        middle = left + _PANEL_WIDTH / 2
        lines.append(f'<text x="{middle}" y="{_HEIGHT - 4}" text-anchor="middle">{escape(panel.title)}</text>')
        for name, color in zip(names, _COLORS, strict=False):
            ys = [y_of(curves[name]) for _, curves in panel.points]
            places = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
            lines.append(f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="2"/>')
            lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in zip(xs, ys, strict=True)]
    for place, (name, color) in enumerate(zip(names, _COLORS, strict=False)):
        x, y = width - _LEGEND_WIDTH + 10, _TOP + 20 * place
        lines.append(f'<path d="M{x} {y}h20" stroke="{color}" stroke-width="3"/>')
        lines.append(f'<text x="{x + 26}" y="{y + 4}">{escape(name)}</text>')
    path.write_text("\n".join([*lines, "</svg>"]) + "\n", encoding="utf-8")
