"""The image processor of Step 3.7 and Step3-VL with Pillow and numpy; transformers has it with torchvision alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from octavo.config.section import Section
from octavo.multimodal.pixels import Arrays, FloatPixels

_BILINEAR: Final = 2
_NARROW: Final = 32
"""Images with a shorter side, and a much longer one, are filled up to squares."""


class StepImages:
    """Scales an image to a square, and cuts a large or long one into windows beside that, each scaled to another."""

    KNOWN: Final[frozenset[str]] = frozenset()
    """Settings that a person may change."""

    def __init__(self, settings: Section, config: Section) -> None:
        self._pixels = FloatPixels.read(settings, _BILINEAR)
        self._side, self._tile = settings.part("size").positive("height", 728), settings.positive("tile_size", 504)
        self._longest = settings.positive("max_image_size", 3024)

    def __call__(self, images: Sequence[Any], return_tensors: str) -> Arrays:
        """Return pixel_values [images, 3, side, side], pixel_values_local [windows, 3, tile, tile] where there are any,
        num_local_patches [images], and grids [images, (rows, columns)] of windows."""
        made = [self._pieces(image) for image in images]
        tiles = [self._pixels.array(each, self._tile, self._tile) for _, windows, _ in made for each in windows]
        return {
            "pixel_values": np.stack([self._pixels.array(whole, self._side, self._side) for whole, _, _ in made]),
            **({"pixel_values_local": np.stack(tiles)} if tiles else {}),
            "num_local_patches": np.array([len(windows) for _, windows, _ in made], np.int64),
            "grids": np.array([grid for _, _, grid in made], np.int64),
        }

    def _pieces(self, image: Any) -> tuple[Any, list[Any], tuple[int, int]]:
        """Return the whole image, its windows row by row, and the rows and columns of these."""
        ratio = max(image.size) / min(image.size)
        if min(image.size) < _NARROW and ratio > 4:
            image = image.crop((0, 0, max(image.size), max(image.size)))
        if max(image.size) > self._longest:
            scale = self._longest / max(image.size)
            image = image.resize(tuple(max(1, int(each * scale)) for each in image.size), _BILINEAR)
        window = self._window(max(image.size), min(image.size))
        if not window:
            return image, [], (0, 0)
        width, height = (self._whole(each, window) for each in image.size)
        scaled = image if (width, height) == image.size else image.resize((width, height), _BILINEAR)
        columns, rows = max(1, width // window), max(1, height // window)
        corners = [(column * window, row * window) for row in range(rows) for column in range(columns)]
        return image, [scaled.crop((x, y, x + window, y + window)) for x, y in corners], (rows, columns)

    def _window(self, longer: int, shorter: int) -> int:
        """Return the side of windows, 0 for an image that is not cut."""
        if longer < self._side:
            return shorter if longer / shorter > 1.5 else 0
        return min(shorter, self._tile) if longer / shorter > 4 else self._tile

    def _whole(self, side: int, window: int) -> int:
        """Return a side as a multiple of that of windows, the next one where more than a fifth of one is left."""
        if side < window:
            return side
        count = side // window
        return window * (count + (side / window - count > 0.2))
