"""The image processor of NVIDIA's models of pages with Pillow and numpy; their code has it with torchvision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from octavo.config.section import Section
from octavo.multimodal.pixels import Arrays, Pixels

_BICUBIC: Final = 3
_MOST_TILES: Final = 64
_ENOUGH: Final = 0.6
"""Share of an image's pixels above which a grid with more pixels is not preferred."""


class NemotronTiles:
    """Scales an image to a grid of tiles, and adds the whole image behind several of them."""

    KNOWN: Final = frozenset({"max_patches", "min_patches"})
    """Settings that a person may change."""

    def __init__(self, settings: Section, config: Section) -> None:
        self._pixels = Pixels.read(settings, _BICUBIC, [0.5], [0.5])
        self._side = settings.part("size").positive("height", 512)
        least, most = settings.positive("min_patches", 1), settings.positive("max_patches", 1)
        if not least <= most <= _MOST_TILES:
            raise settings.error("max_patches", f"{least} to {_MOST_TILES}")
        sides = range(1, most + 1)
        grids = [(columns, rows) for columns in sides for rows in sides if least <= columns * rows <= most]
        self._grids = sorted(grids, key=lambda grid: grid[0] * grid[1])

    def __call__(self, images: Sequence[Any], return_tensors: str) -> Arrays:
        """Return pixel_values [tiles of all images, 3, side, side]."""
        tiles: list[Any] = []
        for image in images:
            columns, rows = self._grid(image.width, image.height)
            tiles += self._pixels.tiles(image, columns, rows, self._side, self._side)
            if columns * rows > 1:
                tiles += self._pixels.tiles(image, 1, 1, self._side, self._side)
        return {"pixel_values": np.stack([self._pixels.array(tile) for tile in tiles])}

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the columns and rows of the grid that fits best; of equal ones, that with the fewest tiles."""
        own = width / height

        def fit(grid: tuple[int, int]) -> float:
            columns, rows = grid
            ratio = columns / rows
            area = columns * rows * self._side**2 / (width * height)
            return min(area, _ENOUGH) * min(ratio / own, own / ratio)

        return max(self._grids, key=fit)
