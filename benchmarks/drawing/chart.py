"""Line charts as SVG: a few panels with axes, labels and a legend, on a light or a dark ground as the reader has it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple
from xml.sax.saxutils import escape

_WIDTH: Final = 470
_HEIGHT: Final = 268
_LEFT: Final = 66
_RIGHT: Final = 20
_TOP: Final = 60
_BOTTOM: Final = 46
"""Of a panel, and what of it lies outside its axes."""
_HEAD: Final = 46

_STYLE: Final = """\
.ground { fill: #ffffff } .edge { fill: none; stroke: #e3e6ea }
text { fill: #3c434c } .head { fill: #14181d; font-weight: 600 } .faint { fill: #6b7580 }
.grid { stroke: #e9ecef } .axis { stroke: #9aa3ad }
.line { fill: none; stroke-width: 1.9; stroke-linejoin: round; stroke-linecap: round }
.s0 { stroke: #2f6db3 } .s1 { stroke: #d2691e } .s2 { stroke: #3a8f55 } .s3 { stroke: #94489b }
.d0 { fill: #2f6db3 } .d1 { fill: #d2691e } .d2 { fill: #3a8f55 } .d3 { fill: #94489b }
@media (prefers-color-scheme: dark) {
.ground { fill: #15191e } .edge { stroke: #2b323a }
text { fill: #c4ccd4 } .head { fill: #f0f3f6 } .faint { fill: #8f9aa5 }
.grid { stroke: #262d34 } .axis { stroke: #5d6873 }
.s0 { stroke: #6ea8ea } .s1 { stroke: #f0985a } .s2 { stroke: #72c78c } .s3 { stroke: #cf8ed6 }
.d0 { fill: #6ea8ea } .d1 { fill: #f0985a } .d2 { fill: #72c78c } .d3 { fill: #cf8ed6 }
}"""
MAX_SERIES: Final = 4
"""Lines of a panel: there are as many colours."""


class Series(NamedTuple):
    """A line through `points` (x, y), in rising x."""

    name: str
    points: Sequence[tuple[float, float]]


class Panel(NamedTuple):
    """One set of axes from 0. `y_max`: the end of the y axis, by default a round number above all points.

    has_marks: draw the points as well: they are few, and measured one by one. is_wide: values that spread over more
    than a factor of 30 have a logarithmic y axis.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    y_max: float | None = None
    has_marks: bool = False
    is_wide: bool = False


class Axis(NamedTuple):
    """Where values lie between the ends `low` and `high`."""

    low: float
    high: float
    ticks: Sequence[float]
    is_log: bool = False

    def share(self, value: float) -> float:
        """0 at the low end, 1 at the high one; what lies outside is drawn at the end."""
        if self.is_log:
            value, low, high = (math.log(max(each, self.low)) for each in (value, self.low, self.high))
        else:
            low, high = self.low, self.high
        return min(max((value - low) / (high - low), 0.0), 1.0)


def render(title: str, panels: Sequence[Panel], columns: int = 2) -> str:
    """The whole picture."""
    columns = min(columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    width, height = columns * _WIDTH, rows * _HEIGHT + _HEAD
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f"<style>\n{_STYLE}\n</style>",
        f'<rect class="ground" width="{width}" height="{height}" rx="8"/>',
        f'<rect class="edge" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="7.5"/>',
        _text(_LEFT, 30, title, size=16, css="head"),
    ]
    for place, panel in enumerate(panels):
        x, y = place % columns * _WIDTH, place // columns * _HEIGHT + _HEAD
        parts += [f'<g transform="translate({x} {y})">', *_panel(panel), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel) -> list[str]:
    assert len(panel.series) <= MAX_SERIES, "more lines than colours"
    x_axis, y_axis = _x_axis(panel), _y_axis(panel)
    inner_width, inner_height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    right, bottom = _LEFT + inner_width, _TOP + inner_height

    def at_x(x: float) -> float:
        return round(_LEFT + x_axis.share(x) * inner_width, 1)

    def at_y(y: float) -> float:
        return round(bottom - y_axis.share(y) * inner_height, 1)

    parts = [_text(_LEFT, 20, panel.title, size=13, css="head")]
    for y in y_axis.ticks:
        css = "axis" if at_y(y) == bottom else "grid"
        parts.append(f'<line class="{css}" x1="{_LEFT}" y1="{at_y(y)}" x2="{right}" y2="{at_y(y)}"/>')
        parts.append(_text(_LEFT - 8, at_y(y) + 4, _number(y), anchor="end"))
    for x in x_axis.ticks:
        parts.append(f'<line class="axis" x1="{at_x(x)}" y1="{bottom}" x2="{at_x(x)}" y2="{bottom + 4}"/>')
        parts.append(_text(at_x(x), bottom + 17, _number(x), anchor="middle"))
    parts.append(_text((_LEFT + right) / 2, bottom + 36, panel.x_label, anchor="middle", css="faint"))
    middle = (_TOP + bottom) / 2
    scale = ", logarithmic" if y_axis.is_log else ""
    label = escape(panel.y_label + scale)
    parts.append(
        f'<text class="faint" transform="translate(15 {middle}) rotate(-90)" text-anchor="middle">{label}</text>'
    )
    legend_x = float(_LEFT)
    for place, series in enumerate(panel.series):
        points = " ".join(f"{at_x(x)},{at_y(y)}" for x, y in series.points)
        parts.append(f'<polyline class="line s{place}" points="{points}"/>')
        if panel.has_marks:
            parts += [f'<circle class="d{place}" cx="{at_x(x)}" cy="{at_y(y)}" r="2.9"/>' for x, y in series.points]
        parts.append(f'<rect class="d{place}" x="{legend_x:g}" y="34" width="14" height="3.4" rx="1.7"/>')
        parts.append(_text(round(legend_x + 20, 1), 40, series.name))
        legend_x += 38 + 6.6 * len(series.name)
    return parts


def _x_axis(panel: Panel) -> Axis:
    high = max((x for series in panel.series for x, _ in series.points), default=0.0) or 1.0
    if panel.has_marks:
        high *= 1.04  # the last point stands clear of the edge
    return Axis(0.0, high, [tick for tick in ticks(0.0, high, count=6) if tick <= high])


def _y_axis(panel: Panel) -> Axis:
    values = [y for series in panel.series for _, y in series.points]
    above_zero = [value for value in values if value > 0]
    if panel.is_wide and above_zero and max(above_zero) > 30 * min(above_zero):
        low, high = min(above_zero), max(above_zero)
        marks = [
            factor * 10.0**power
            for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            for factor in ((1,) if high > 3000 * low else (1, 2, 5))
        ]
        start = max(place for place, mark in enumerate(marks) if mark <= low * 1.0001)
        end = min(place for place, mark in enumerate(marks) if mark >= high * 0.9999)
        return Axis(marks[start], marks[end], marks[start : end + 1], is_log=True)
    steps = ticks(0.0, max(values, default=1.0) if panel.y_max is None else panel.y_max)
    return Axis(0.0, steps[-1], steps)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from `low` to at least `high`, about `count` steps of 1, 2, 2.5 or 5 times a power of ten."""
    span = high - low
    if not span > 0:
        return [low, low + 1]
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    # a quarter of a hundred is a round number; two and a half are none
    factors = (1, 2, 2.5, 5, 10) if power >= 10 else (1, 2, 5, 10)
    step = power * next(factor for factor in factors if factor * power >= rough * 0.999)
    return [low + i * step for i in range(math.ceil(span / step - 1e-9) + 1)]


def _number(value: float) -> str:
    return f"{value:,.10g}" if abs(value) >= 1 or value == 0 else f"{value:.3g}"


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, css: str | None = None) -> str:
    css_class = f' class="{css}"' if css is not None else ""
    how = "" if size == 12 else f' font-size="{size}"'
    return f'<text{css_class} x="{x:g}" y="{y:g}" text-anchor="{anchor}"{how}>{escape(text)}</text>'
