"""The image processor of MiniCPM-V 2.6 to 4.5 with Pillow and numpy; its release has it beside the weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from octavo.config.section import Section
from octavo.multimodal.pixels import Arrays, Pixels


class MiniCPMImages:
    """Scales an image to about as many pixels as the encoder was made for, and adds slices of a large one behind it."""

    KNOWN: Final = frozenset({"max_slice_nums"})
    """Settings that a person may change."""

    def __init__(self, settings: Section, config: Section) -> None:
        for name in ("norm_mean", "norm_std"):
            settings.expect(name, [0.5] * 3, default=[0.5] * 3)
        settings.expect("slice_mode", True, default=True)
        self._pixels = Pixels.read(settings, 3, [0.5], [0.5])
        vision = config.part("vision_config")
        self._patch: int = settings.expect("patch_size", vision.positive("patch_size", 14), default=14)
        self._side, self._most = settings.positive("scale_resolution", 448), settings.positive("max_slice_nums", 9)

    def __call__(self, images: Sequence[Any], return_tensors: str) -> Arrays:
        """Return pixel_values [slices of all images, 3, height, width], filled up with zeros on the right and below,
        target_sizes [slices, (rows, columns)] of patches, and grids [images, (rows, columns)] of slices."""
        made = [self._slices(image) for image in images]
        pixels = [self._pixels.array(each) for slices, _ in made for each in slices]
        height, width = (max(each.shape[side] for each in pixels) for side in (1, 2))
        filled = [np.pad(each, ((0, 0), (0, height - each.shape[1]), (0, width - each.shape[2]))) for each in pixels]
        sizes = [(each.shape[1] // self._patch, each.shape[2] // self._patch) for each in pixels]
        return {
            "pixel_values": np.stack(filled),
            "target_sizes": np.array(sizes, np.int64),
            "grids": np.array([grid for _, grid in made], np.int64),
        }

    def _slices(self, image: Any) -> tuple[list[Any], tuple[int, int]]:
        """Return the whole image with its slices by rows, and the rows and columns of these."""
        width, height = image.size
        grid = self._grid(width, height)
        may_grow = grid is None or width * height > self._side**2
        size = self._scaled(width, height) if may_grow else (self._whole(width), self._whole(height))
        scaled = image.resize(size, self._pixels.resample)
        if grid is None:
            return [scaled], (0, 0)
        columns, rows = grid
        sides = ((width, columns), (height, rows))
        tile = self._scaled(*(max(round(side / count), 1) for side, count in sides))
        return [scaled, *self._pixels.tiles(image, columns, rows, *tile)], (rows, columns)

    def _grid(self, width: int, height: int) -> tuple[int, int] | None:
        """Return the columns and rows of slices with nearly the ratio of sides; None for an image that is not cut."""
        count = min(math.ceil(width * height / self._side**2), self._most)
        if count <= 1:
            return None
        counts = [each for each in (count - 1, count, count + 1) if 1 < each <= self._most]
        grids = [(columns, each // columns) for each in counts for columns in range(1, each + 1) if not each % columns]
        ratio = math.log(width / height)
        return min(grids, key=lambda grid: abs(ratio - math.log(grid[0] / grid[1])))

    def _scaled(self, width: float, height: float) -> tuple[int, int]:
        """Return (width, height) of whole patches with about the pixels of a slice."""
        ratio = width / height
        scaled = int(self._side / math.sqrt(ratio))
        return self._whole(int(scaled * ratio)), self._whole(scaled)

    def _whole(self, side: int) -> int:
        return max(round(side / self._patch), 1) * self._patch
