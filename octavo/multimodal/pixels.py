"""Images of Pillow as arrays of numbers, and the grids of tiles into which they are cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.config.section import Section

Arrays = dict[str, NDArray[Any]]
_BICUBIC: Final = -0.75
"""The parameter of torch's bicubic interpolation."""
CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Final = (0.26862954, 0.26130258, 0.27577711)
_FILTERS: Final = range(6)
"""Pillow's filters by its numbers; 2 is bilinear, 3 bicubic."""


class Pixels(NamedTuple):
    """How images are scaled, and pixels become numbers. of_bytes: [3, 256], what each byte of a color becomes."""

    resample: int
    of_bytes: NDArray[np.float32]

    @classmethod
    def read(
        cls,
        settings: Section,
        resample: int,
        mean: Sequence[float],
        std: Sequence[float],
        rounded: Callable[[NDArray[np.float32]], NDArray[np.float32]] | None = None,
    ) -> Pixels:
        """Read the settings of a checkpoint, with defaults. rounded: rounds what each step of normalising makes.

        Raises CheckpointError or UnsupportedModel.
        """
        settings.expect_all(do_resize=True, do_rescale=True, do_normalize=True, do_pad=True)
        scale = settings.positive_float("rescale_factor", 1 / 255)
        given = [settings.values.get(name) or default for name, default in (("image_mean", mean), ("image_std", std))]
        colors = [np.broadcast_to(np.array(each, np.float32), 3).reshape(3, 1) for each in given]
        of_bytes, unit = np.arange(256, dtype=np.float32)[None], np.float32(scale)
        if rounded is None:
            of_bytes = (of_bytes - colors[0] / unit) / (colors[1] / unit)
        else:
            of_bytes = rounded(rounded(rounded(of_bytes * unit) - rounded(colors[0])) / rounded(colors[1]))
        return cls(settings.expect("resample", *_FILTERS, default=resample), of_bytes)

    @classmethod
    def in_steps(cls, settings: Section, resample: int) -> Pixels:
        """Read settings as `read` does. Each step is rounded: bytes to colors up to 1, minus the mean, by the
        deviation."""
        made = cls.read(settings, resample, [0.5], [0.5])
        given = (settings.values.get(name) or [0.5] for name in ("image_mean", "image_std"))
        mean, std = (np.broadcast_to(np.array(each, np.float32), 3).reshape(3, 1) for each in given)
        return made._replace(of_bytes=(np.arange(256, dtype=np.float32)[None] / np.float32(255) - mean) / std)

    def tiles(self, image: Any, columns: int, rows: int, width: int, height: int) -> list[Any]:
        """Return an image of Pillow scaled and cut into so many tiles of a size, row by row."""
        whole = image.resize((width * columns, height * rows), self.resample)
        corners = [(column * width, row * height) for row in range(rows) for column in range(columns)]
        return [whole.crop((left, top, left + width, top + height)) for left, top in corners]

    def array(self, image: Any) -> NDArray[np.float32]:
        """Return float32 [3, height, width]."""
        pixels = np.asarray(image, np.uint8).transpose(2, 0, 1)
        return np.stack([table[color] for table, color in zip(self.of_bytes, pixels, strict=True)])


class FloatPixels(NamedTuple):
    """As `Pixels`, for images that are scaled as floats, which keep values below 0 and above 255. mean, std: [3, 1, 1],
    of colors up to 255."""

    resample: int
    mean: NDArray[np.float32]
    std: NDArray[np.float32]

    @classmethod
    def read(cls, settings: Section, resample: int) -> FloatPixels:
        """Read the settings of a checkpoint, with those of CLIP as defaults. Raises as `Pixels.read`."""
        settings.expect_all(do_resize=True, do_rescale=True, do_normalize=True)
        settings.expect("resample", resample, default=resample)
        unit = np.float32(settings.positive_float("rescale_factor", 1 / 255))
        given = (settings.values.get("image_mean") or CLIP_MEAN, settings.values.get("image_std") or CLIP_STD)
        return cls(resample, *(np.broadcast_to(np.array(e, np.float32), 3).reshape(3, 1, 1) / unit for e in given))

    def array(self, image: Any, width: int, height: int) -> NDArray[np.float32]:
        """Return float32 [3, height, width]. One color is scaled at a time: an image may be large."""
        scaled = (each.convert("F").resize((width, height), self.resample) for each in image.split())
        return np.asarray((np.stack([np.asarray(each, np.float32) for each in scaled]) - self.mean) / self.std)


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the numbers that bfloat16 has, of two at the same distance the even one."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def closest_grid(width: int, height: int, least: int, most: int, tile: int) -> tuple[int, int]:
    """Return the columns and rows of tiles with the closest ratio of sides; of equal ones, the largest grid of whose
    pixels the image has more than half."""
    sides = range(1, most + 1)
    grids = {(columns, rows) for columns in sides for rows in sides if least <= columns * rows <= most}
    best, closest = (1, 1), math.inf
    for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        distance = abs(width / height - columns / rows)
        fills = width * height > 0.5 * columns * rows * tile**2
        if distance < closest or (distance == closest and fills):
            best, closest = (columns, rows), distance
    return best


def cut(pixels: NDArray[np.float32], side: int) -> NDArray[np.float32]:
    """Return the pieces [pieces, 3, side, side] of [3, height, width], row by row."""
    rows, columns = (length // side for length in pixels.shape[1:])
    return pixels.reshape(3, rows, side, columns, side).transpose(1, 3, 0, 2, 4).reshape(-1, 3, side, side)


def bicubic(values: NDArray[np.float32], side: int) -> NDArray[np.float32]:
    """Return [3, side, side] of [3, height, width] as torch's `interpolate` computes it without a filter against
    aliases."""
    for _ in ("columns", "rows"):
        num_values = values.shape[-1]
        places = (np.arange(side, dtype=np.float64) + 0.5) * (num_values / side) - 0.5
        first = np.floor(places)
        made = np.zeros((*values.shape[:-1], side), np.float64)
        for offset in (-1, 0, 1, 2):
            indices = np.clip(first + offset, 0, num_values - 1).astype(np.int64)
            made += values[..., indices] * _share(np.abs(places - first - offset))
        values = made.astype(np.float32).transpose(0, 2, 1)
    return values


def _share(distance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the weight of a value at a distance, 0 to 2."""
    near = ((_BICUBIC + 2) * distance - (_BICUBIC + 3)) * distance**2 + 1
    far = ((_BICUBIC * distance - 5 * _BICUBIC) * distance + 8 * _BICUBIC) * distance - 4 * _BICUBIC
    return np.where(distance <= 1, near, far)
