"""The image processors of Nemotron 3 Omni and Nemotron Nano 2 VL with Pillow and numpy, as others have with torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from octavo.config.section import Section
from octavo.multimodal.pixels import Arrays, FloatPixels, closest_grid, cut

_BICUBIC: Final = 3
_MOST_PIXELS: Final = 1 << 25
_MOST_TILES: Final = 64
_NUM_OTHERS: Final = 4
"""Tokens of the context that are never those of images."""


class NemotronImages:
    """Scales an image to a grid of patches, of which there are neither too few nor too many."""

    KNOWN: ClassVar[frozenset[str]] = frozenset()
    """Settings that a person may change."""

    def __init__(self, settings: Section, config: Section) -> None:
        self._pixels = FloatPixels.read(settings, _BICUBIC)
        vision, ratio = config.section("vision_config") or config, config.positive_float("downsample_ratio", 0.5)
        self._patch: int = settings.expect("patch_size", vision.positive("patch_size", 16), default=16)
        settings.expect("downsample_ratio", ratio, default=ratio)
        self._merged = round(1 / ratio)
        self._least, most = settings.positive("min_num_patches", 1024), settings.count("max_num_patches", 13312)
        room = (settings.positive("max_model_len", 16384) - _NUM_OTHERS) * self._merged**2
        self._most = max(min(room, most) if most else room, self._least)
        if self._most * self._patch**2 > _MOST_PIXELS:
            limit = f"{_MOST_PIXELS // self._patch**2:,}, with which an image has {_MOST_PIXELS:,} pixels"
            raise settings.error("max_num_patches", f"1 to {limit}")

    def __call__(self, images: Sequence[Any], return_tensors: str) -> Arrays:
        """Return pixel_values [patches of all images, 3 · patch · patch], row by row, and image_grid_hw [images,
        (rows, columns)] of patches."""
        grids = [self._grid(image.width, image.height) for image in images]
        patches = [self._patches(image, *grid) for image, grid in zip(images, grids, strict=True)]
        return {"pixel_values": np.concatenate(patches), "image_grid_hw": np.array(grids, np.int64)}

    def _patches(self, image: Any, rows: int, columns: int) -> NDArray[np.float32]:
        size = self._patch
        pieces = cut(self._pixels.array(image, columns * size, rows * size), size)
        return np.asarray(pieces.reshape(rows * columns, -1), np.float32)

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the rows and columns of patches, multiples of those that are merged."""
        rows, columns = (round(each / self._patch + 0.5) for each in (height, width))
        factor = min(math.sqrt(self._most / (rows * columns)), 1.0)
        rows, columns = max(1, math.floor(factor * rows)), max(1, math.floor(factor * columns))
        if rows * columns < self._least < self._most:
            factor = math.sqrt(self._least / (rows * columns))
            rows, columns = math.ceil(factor * rows), math.ceil(factor * columns)
        rows = self._whole(rows, columns)
        return rows, self._whole(columns, rows)

    def _whole(self, side: int, other: int) -> int:
        """Return a side as a multiple of the patches that are merged: the next one where there is room for it."""
        rest = side % self._merged
        if not rest:
            return side
        up = side + self._merged - rest
        return up if up * other <= self._most else max(self._merged, side - rest)


class NemotronSquares(NemotronImages):
    """Scales an image to a grid of square tiles, and adds the whole image behind several of them."""

    KNOWN = frozenset({"max_num_tiles"})

    def __init__(self, settings: Section, config: Section) -> None:
        super().__init__(settings, config)
        self._side = settings.part("size").positive("height", 512)
        self._tiles = settings.positive("max_num_tiles", 12)
        if self._tiles > _MOST_TILES:
            raise settings.error("max_num_tiles", f"1 to {_MOST_TILES}")

    def __call__(self, images: Sequence[Any], return_tensors: str) -> Arrays:
        """Return pixel_values [patches of all tiles, 3 · patch · patch], tile by tile and row by row in each, and
        image_grid_hw [images, (rows, columns)] of patches, with the tiles of an image below each other."""
        patches, grids, side = [], [], self._side // self._patch
        for image in images:
            columns, rows = closest_grid(image.width, image.height, 1, self._tiles, self._side)
            whole = self._patches(image, rows * side, columns * side).reshape(rows, side, columns, side, -1)
            tiles = [whole.transpose(0, 2, 1, 3, 4).reshape(rows * columns * side * side, -1)]
            if rows * columns > 1:
                tiles.append(self._patches(image, side, side))
            patches += tiles
            grids.append((sum(map(len, tiles)) // side, side))
        return {"pixel_values": np.concatenate(patches), "image_grid_hw": np.array(grids, np.int64)}
