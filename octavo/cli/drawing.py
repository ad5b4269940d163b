"""Small charts of characters; an encoding that lacks them gets similar ones (`octavo.cli.terminal`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_LEVELS: Final = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float]) -> str:
    """Return a character for each value, higher for larger ones; the largest has the highest, 0 a blank."""
    most = max(values, default=0.0) or 1.0
    return "".join(_LEVELS[min(7, int(8 * value / most))] if value > 0 else " " for value in values)


def histogram(values: Sequence[float], width: int = 16) -> str:
    """Return how many values lie in each of `width` equal parts between the least and the largest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    counts = [0] * width
    for value in values:
        counts[min(width - 1, int((value - low) / ((high - low) or 1.0) * width))] += 1
    return sparkline(counts)
