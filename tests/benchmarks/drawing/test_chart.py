"""Charts: round numbers on axes, lines within them, one colour a line."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from benchmarks.drawing.chart import MAX_SERIES, Panel, Series, render, ticks


def elements(svg: str, tag: str) -> list[ET.Element]:
    return [element for element in ET.fromstring(svg).iter() if element.tag.endswith("}" + tag)]


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in elements(svg, "text")]


@pytest.mark.parametrize(
    ("high", "expected"),
    [
        (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (7.3, [0, 2, 4, 6, 8]),
        (100.0, [0, 20, 40, 60, 80, 100]),
        (110.0, [0, 25, 50, 75, 100, 125]),
        (0.0, [0, 1]),
    ],
)
def test_ticks_are_round_and_reach_the_end(high: float, expected: list[float]) -> None:
    assert ticks(0.0, high) == pytest.approx(expected)


def test_lines_lie_within_their_axes() -> None:
    panel = Panel("p", "x", "y", [Series("s", [(0.0, 0.0), (5.0, 250.0), (10.0, 90.0)])], y_max=100.0)
    (line,) = elements(render("t", [panel]), "polyline")
    points = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
    assert points == [(66.0, 222.0), (258.0, 60.0), (450.0, 76.2)]  # what is above the axis is cut off at its end


def test_values_that_spread_widely_get_a_logarithmic_axis() -> None:
    wide = Panel("p", "x", "seconds", [Series("s", [(1.0, 0.03), (2.0, 30.0)])], is_wide=True)
    shown = texts(render("t", [wide]))
    assert "seconds, logarithmic" in shown
    assert [text for text in shown if text in ("0.02", "0.2", "2", "20", "50")] == ["0.02", "0.2", "2", "20", "50", "2"]
    (line,) = elements(render("t", [wide]), "polyline")
    ends = [float(pair.split(",")[1]) for pair in line.attrib["points"].split()]
    assert 60.0 < ends[1] < ends[0] < 222.0
    narrow = wide._replace(series=[Series("s", [(1.0, 3.0), (2.0, 30.0)])])
    assert "seconds" in texts(render("t", [narrow]))


def test_every_line_has_a_colour_on_both_grounds() -> None:
    series = [Series(f"line {i}", [(0.0, 1.0), (1.0, 2.0)]) for i in range(MAX_SERIES)]
    svg = render("t", [Panel("p", "x", "y", series, has_marks=True)])
    (style,) = elements(svg, "style")
    light, dark = (style.text or "").split("@media (prefers-color-scheme: dark)")
    for place, line in enumerate(elements(svg, "polyline")):
        assert line.attrib["class"] == f"line s{place}"
        assert all(f".{kind}{place} " in sheet for kind in "sd" for sheet in (light, dark))
    assert len(elements(svg, "circle")) == 2 * MAX_SERIES


def test_a_panel_without_points_is_drawn() -> None:
    assert "empty" in texts(render("t", [Panel("empty", "x", "y", [Series("s", [])])]))


def test_what_is_written_is_escaped() -> None:
    assert "a < b & c" in texts(render("a < b & c", [Panel("p", "x", "y", [])]))
