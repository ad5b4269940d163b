"""The image processor of DeepSeek-VL2 with Pillow and numpy; its release has it with torchvision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from octavo.config.section import Section
from octavo.multimodal.pixels import Arrays, Pixels

_BICUBIC: Final = 3


class DeepseekVl2Images:
    """Fits an image into a square, and into the grid of tiles in which it loses least, and fills both up with gray."""

    KNOWN: Final = frozenset[str]()
    """Settings that a person may change."""

    def __init__(self, settings: Section, config: Section) -> None:
        self._pixels = Pixels.in_steps(settings, _BICUBIC)
        self._side = config.part("vision_config").positive("image_size", 384)
        self._sizes: list[tuple[int, int]] = [(each[0], each[1]) for each in settings.values["candidate_resolutions"]]
        colors = np.broadcast_to(settings.values.get("image_mean") or [0.5], 3)
        self._fill = tuple(int(255 * each) for each in colors)

    def __call__(self, images: Sequence[Any], return_tensors: str, *, is_cut: bool = True) -> Arrays:
        """Return pixel_values [tiles of all images, 3, side, side], the whole of each image before its tiles, and grids
        [images, (rows, columns)]. is_cut: False for one tile of each image."""
        tiles, grids = [], []
        for image in images:
            width, height = self._best(*image.size) if is_cut else (self._side, self._side)
            columns, rows = width // self._side, height // self._side
            tiles.append(self._filled(image, self._side, self._side))
            tiles += self._pixels.tiles(self._filled(image, width, height), columns, rows, self._side, self._side)
            grids.append((rows, columns))
        pixels = np.stack([self._pixels.array(tile) for tile in tiles])
        return {"pixel_values": pixels, "grids": np.array(grids, np.int64)}

    def _best(self, width: int, height: int) -> tuple[int, int]:
        """Return the size that keeps most pixels of an image; of equal ones the smallest, and of these the first."""

        def kept(size: tuple[int, int]) -> tuple[int, int]:
            scale = min(size[0] / width, size[1] / height)
            pixels = min(int(width * scale) * int(height * scale), width * height)
            return pixels, pixels - size[0] * size[1]

        return max(self._sizes, key=kept)

    def _filled(self, image: Any, width: int, height: int) -> Any:
        from PIL import ImageOps

        return ImageOps.pad(image, (width, height), method=self._pixels.resample, color=self._fill)
