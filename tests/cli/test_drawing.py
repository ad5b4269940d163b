"""Charts of characters."""

from __future__ import annotations

from octavo.cli.drawing import histogram, sparkline


def test_the_largest_value_is_the_highest_and_zero_is_a_blank() -> None:
    assert sparkline([0.0, 1.0, 4.0, 8.0]) == " ▂▅█"
    assert sparkline([]) == ""
    assert sparkline([0.0]) == " "


def test_a_histogram_counts_between_the_least_and_the_largest() -> None:
    assert histogram([1.0, 1.1, 9.0], width=4) == "█  ▅"
    assert histogram([2.0, 2.0], width=3) == "█  "
    assert histogram([]) == ""
