"""Line charts as SVG: a few panels with axes, labels and a legend, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple
from xml.sax.saxutils import escape

COLOURS: Final = ("#2f6db3", "#d9822b", "#4a9a5b", "#9a4a8f")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 460, 270, 62, 18, 58, 44
"""Of a panel, and what of it lies outside its axes."""


class Series(NamedTuple):
    """A line through `points` (x, y), in rising x."""

    name: str
    points: Sequence[tuple[float, float]]


class Panel(NamedTuple):
    """One set of axes. `y_max`: the end of the y axis, by default a round number above all points."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    y_max: float | None = None
    has_marks: bool = False
    """Draw the points as well: they are few, and measured one by one."""


def render(title: str, panels: Sequence[Panel], columns: int = 2) -> str:
    """The whole picture."""
    columns = min(columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    width, height = columns * _WIDTH, rows * _HEIGHT + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#333">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        _text(_LEFT, 24, title, size=14, weight="bold"),
    ]
    for place, panel in enumerate(panels):
        x, y = place % columns * _WIDTH, place // columns * _HEIGHT + 34
        parts += [f'<g transform="translate({x} {y})">', *_panel(panel), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel) -> list[str]:
    xs = [x for series in panel.series for x, _ in series.points]
    ys = [y for series in panel.series for _, y in series.points]
    x_ticks = ticks(0.0, max(xs, default=1.0))
    y_ticks = ticks(0.0, max(ys, default=1.0) if panel.y_max is None else panel.y_max)
    x_end = max([*xs, 0.0]) if panel.has_marks is False and xs else x_ticks[-1]
    x_end, y_end = x_end or 1.0, y_ticks[-1]
    inner_width, inner_height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at_x(x: float) -> float:
        return round(_LEFT + x / x_end * inner_width, 1)

    def at_y(y: float) -> float:
        return round(_TOP + inner_height - min(y / y_end, 1.0) * inner_height, 1)

    right, bottom = _LEFT + inner_width, _TOP + inner_height
    parts = [_text(_LEFT, 18, panel.title, size=13, weight="bold")]
    for y in y_ticks:
        colour = "#999" if y == 0 else "#e4e4e4"
        parts.append(f'<line x1="{_LEFT}" y1="{at_y(y)}" x2="{right}" y2="{at_y(y)}" stroke="{colour}"/>')
        parts.append(_text(_LEFT - 7, at_y(y) + 4, _number(y), anchor="end"))
    for x in x_ticks:
        if x <= x_end * 1.0001:
            parts.append(f'<line x1="{at_x(x)}" y1="{bottom}" x2="{at_x(x)}" y2="{bottom + 4}" stroke="#999"/>')
            parts.append(_text(at_x(x), bottom + 17, _number(x), anchor="middle"))
    parts.append(_text((_LEFT + right) / 2, bottom + 35, panel.x_label, anchor="middle"))
    middle = (_TOP + bottom) / 2
    label = escape(panel.y_label)
    parts.append(f'<text transform="translate(16 {middle}) rotate(-90)" text-anchor="middle">{label}</text>')
    legend_x = float(_LEFT)
    for series, colour in zip(panel.series, COLOURS, strict=False):
        points = " ".join(f"{at_x(x)},{at_y(y)}" for x, y in series.points)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-linejoin="round"/>'
        )
        if panel.has_marks:
            parts += [f'<circle cx="{at_x(x)}" cy="{at_y(y)}" r="2.8" fill="{colour}"/>' for x, y in series.points]
        parts.append(f'<line x1="{legend_x}" y1="36" x2="{legend_x + 16}" y2="36" stroke="{colour}" stroke-width="3"/>')
        parts.append(_text(legend_x + 21, 40, series.name))
        legend_x += 36 + 6.4 * len(series.name)
    return parts


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from `low` to at least `high`, about `count` steps of 1, 2 or 5 times a power of ten."""
    span = high - low
    if not span > 0:
        return [low, low + 1]
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return [low + i * step for i in range(math.ceil(span / step - 1e-9) + 1)]


def _number(value: float) -> str:
    return f"{value:,.10g}" if abs(value) >= 1 or value == 0 else f"{value:.3g}"


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, weight: str = "normal") -> str:
    place = f'x="{x}" y="{y}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" font-weight="{weight}">{escape(text)}</text>'
