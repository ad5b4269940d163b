"""Frames of videos with their time drawn on them, as ERNIE 4.5 VL was trained with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from octavo.errors import CheckpointError, InvalidRequest, one_line

_SHARE: Final = 0.1
"""Size of letters as a share of a frame's shorter side, and width of their border as a share of their size."""
_LEAST_SIDE: Final = 10
"""Least pixels of a frame's shorter side: on smaller frames letters would have no size."""


_CHECKED: Final = (_LEAST_SIDE, 240, 1080)
"""Sides of frames for which a font is tried: its letters have outlines and hints of their own at each size."""
_EVERY_LETTER: Final = "time: 0123456789."
_MOST_WIDTH: Final = 4
"""Width of a letter as a multiple of its size, beyond which a font is damaged: it would take much memory."""


def check_font(file: Path) -> None:
    """Raise CheckpointError for a file that is no font, or whose letters cannot be drawn. Nothing is checked without
    Pillow."""
    try:
        from PIL import Image, ImageFont
    except ImportError:  # images are refused then, with the reason
        return
    try:
        for side in _CHECKED:
            size = int(side * _SHARE)
            left, top, right, bottom = ImageFont.truetype(str(file), size).getbbox(_EVERY_LETTER)
            if max(right - left, bottom - top) > _MOST_WIDTH * size * len(_EVERY_LETTER):
                raise CheckpointError(
                    f"{file}: has letters of more than {_MOST_WIDTH} times their size; download it again"
                )
            _draw(Image.new("RGB", (side, side)), _EVERY_LETTER, ImageFont.truetype(str(file), size))
    except (OSError, ValueError, MemoryError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file}: is no font ({one_line(error)}); download it again") from error


def stamped(frames: Sequence[Any], times: Sequence[float], file: Path) -> list[Any]:
    """Return copies of images of Pillow, of one size, with their seconds drawn into the upper left corner.

    file: a font. Raises InvalidRequest for frames that are too small.
    """
    from PIL import ImageFont

    side = min(frames[0].size)
    if side < _LEAST_SIDE:
        raise InvalidRequest(
            f"a video of the prompt has frames of {frames[0].width} x {frames[0].height} pixels, each side must have "
            f"at least {_LEAST_SIDE}: their time is drawn on them",
            field="multi_modal_data",
        )
    font, made = ImageFont.truetype(str(file), int(side * _SHARE)), []
    for frame, seconds in zip(frames, times, strict=True):
        copy = frame.copy()
        _draw(copy, time_in_words(seconds), font)
        made.append(copy)
    return made


def _draw(frame: Any, text: str, font: Any) -> None:
    from PIL import ImageDraw

    border: dict[str, Any] = {"stroke_width": int(font.size * _SHARE), "stroke_fill": (255, 255, 255)}
    ImageDraw.Draw(frame).text((0, 0), text, font=font, fill=(0, 0, 0), **border)


def time_in_words(seconds: float) -> str:
    """Return hours, minutes and seconds as they are drawn."""
    minutes, rest = divmod(seconds, 60)
    return f"time: {int(minutes // 60):02d}:{int(minutes % 60):02d}:{rest:05.02f}"
