"""Frames of videos with their time drawn on them, as ERNIE 4.5 VL was trained with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from octavo.errors import CheckpointError, InvalidRequest, one_line

_SHARE: Final = 0.1
"""Size of letters as a share of the shorter side, and the width of their border as one of that."""
_LEAST_SIDE: Final = 10
"""Pixels of the shorter side of frames, below which there are no letters."""


def check_font(file: Path) -> None:
    """Raise CheckpointError for a file that is no font. Nothing is checked without Pillow."""
    try:
        from PIL import ImageFont
    except ImportError:  # images are refused then, with the reason
        return
    try:
        ImageFont.truetype(str(file), _LEAST_SIDE)
    except OSError as error:
        raise CheckpointError(f"{file}: is no font ({one_line(error)}); download it again") from error


def stamped(frames: Sequence[Any], times: Sequence[float], file: Path) -> list[Any]:
    """Return copies of images of Pillow, of one size, with their seconds drawn into the upper left corner.

    file: a font. Raises InvalidRequest for frames that are too small.
    """
    from PIL import ImageDraw, ImageFont

    side = min(frames[0].size)
    if side < _LEAST_SIDE:
        raise InvalidRequest(
            f"a video of the prompt has frames of {frames[0].width} x {frames[0].height} pixels, each side must have "
            f"at least {_LEAST_SIDE}: their time is drawn on them",
            field="multi_modal_data",
        )
    size = int(side * _SHARE)
    font, made = ImageFont.truetype(str(file), size), []
    for frame, seconds in zip(frames, times, strict=True):
        copy = frame.copy()
        ImageDraw.Draw(copy).text(
            (0, 0),
            time_in_words(seconds),
            font=font,
            fill=(0, 0, 0),
            stroke_width=int(size * _SHARE),
            stroke_fill=(255, 255, 255),
        )
        made.append(copy)
    return made


def time_in_words(seconds: float) -> str:
    """Return hours, minutes and seconds as they are drawn."""
    minutes, rest = divmod(seconds, 60)
    return f"time: {int(minutes // 60):02d}:{int(minutes % 60):02d}:{rest:05.02f}"
