"""The image processor of Phi-4-multimodal with Pillow and numpy; transformers has it with torchvision alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from octavo.config.section import Section
from octavo.multimodal.pixels import Arrays, Pixels, bicubic, closest_grid, cut


class Phi4Images:
    """Scales an image into a grid of tiles, filled up with white, and adds the whole grid before them as one more."""

    KNOWN: Final = frozenset({"max_patches"})
    """Settings that a person may change."""

    def __init__(self, settings: Section, config: Section) -> None:
        settings.expect("resample", 3, default=3)
        # transformers has this filter for the whole grid; tiles are scaled by another
        self._pixels = Pixels.read(settings, 3, [0.5], [0.5])._replace(resample=2)
        vision = config.part("vision_config")
        self._side, self._patch = vision.positive("image_size", 448), vision.positive("patch_size", 14)
        settings.expect("patch_size", self._patch, default=self._patch)
        if vision.positive("crop_size", self._side) != self._side:
            raise vision.error("crop_size", f"image_size, which is {self._side}")
        if self._side % (2 * self._patch):
            raise vision.error("image_size", f"a multiple of two patches, which are {2 * self._patch} pixels")
        self._most = settings.positive("max_patches", 36)

    def __call__(self, images: Sequence[Any], return_tensors: str) -> Arrays:
        """Return what the encoder reads, filled up to the most tiles of an image.

        image_pixel_values [images, tiles, 3, side, side], the whole grid first; image_attention_mask [images, tiles,
        rows, columns] of patches, 0 where one is none of the image; image_sizes [images, (height, width)] of grids.
        """
        made = [self._tiles(image) for image in images]
        most = max(len(tiles) for tiles, _, _ in made)
        return {
            "image_pixel_values": np.stack([_filled(tiles, most, 0.0) for tiles, _, _ in made]),
            "image_attention_mask": np.stack([_filled(mask, most, 1) for _, mask, _ in made]),
            "image_sizes": np.array([size for _, _, size in made], np.int64),
        }

    def _tiles(self, image: Any) -> tuple[NDArray[np.float32], NDArray[np.int64], tuple[int, int]]:
        """Return [tiles, 3, side, side], [tiles, rows, columns] of patches, and the height and width of the grid."""
        side, num_patches = self._side, self._side // self._patch
        columns, rows = self._grid(*image.size)
        width, height = columns * side, rows * side
        across, down = width / image.width, height / image.height
        scaled = (width, int(image.height * across)) if across < down else (int(image.width * down), height)
        scaled = max(1, scaled[0]), max(1, scaled[1])
        pixels = np.full((height, width, 3), 255, np.uint8)
        pixels[: scaled[1], : scaled[0]] = np.asarray(image.resize(scaled, self._pixels.resample))
        whole = self._pixels.array(pixels)
        mask = np.zeros((rows * num_patches, columns * num_patches), np.int64)
        seen = [
            full // self._patch - (full - own) // self._patch for full, own in ((height, scaled[1]), (width, scaled[0]))
        ]
        mask[: seen[0], : seen[1]] = 1
        own = mask.reshape(rows, num_patches, columns, num_patches).transpose(0, 2, 1, 3)
        masks = own.reshape(-1, num_patches, num_patches)
        return (
            np.concatenate([bicubic(whole, side)[None], cut(whole, side)]),
            np.concatenate([np.ones_like(masks[:1]), masks]),
            (height, width),
        )

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the columns and rows that hold an image as it is, or the closest that the settings allow."""
        columns, rows = math.ceil(width / self._side), math.ceil(height / self._side)
        if columns * rows <= self._most:
            return columns, rows
        return closest_grid(width, height, 1, self._most, self._side)


def _filled(array: NDArray[Any], length: int, value: float) -> NDArray[Any]:
    missing = np.full((length - len(array), *array.shape[1:]), value, array.dtype)
    return np.concatenate([array, missing])
