"""Bars and small charts of characters, for terminals with and without Unicode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TextIO

_LEVELS: Final = ("▁▂▃▄▅▆▇█", "_.:-=+*#")
_FILLS: Final = ("█▓▒░", "#=+.")


def _has_blocks(stream: TextIO) -> bool:
    try:
        "▁█".encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeError, LookupError):
        return False
    return True


def sparkline(values: Sequence[float], stream: TextIO) -> str:
    """Return a character for each value, higher for larger ones; the largest has the highest."""
    levels = _LEVELS[not _has_blocks(stream)]
    most = max(values, default=0.0) or 1.0
    return "".join(levels[min(7, int(8 * value / most))] if value > 0 else " " for value in values)


def histogram(values: Sequence[float], stream: TextIO, width: int = 16) -> str:
    """Return how many values lie in each of `width` equal parts between the least and the largest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    counts = [0] * width
    for value in values:
        counts[min(width - 1, int((value - low) / ((high - low) or 1.0) * width))] += 1
    return sparkline(counts, stream)


def stacked_bar(shares: Sequence[float], width: int, stream: TextIO) -> tuple[str, str]:
    """Return a bar of `width` characters whose parts have these shares, up to four, and the character of each part.

    A part above 0 has at least one character; what is left at the end is free, the last character.
    """
    fills = _FILLS[not _has_blocks(stream)]
    bar = "".join(fill * max(round(share * width), share > 0) for fill, share in zip(fills, shares, strict=False))
    return bar[:width].ljust(width, fills[-1]), fills
