"""The image processor of Phi-3-vision with Pillow and numpy; its release has it with torchvision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from octavo.config.section import Section
from octavo.multimodal.pixels import CLIP_MEAN, CLIP_STD, Arrays, Pixels, bicubic, cut

_BILINEAR: Final = 2
_TRANSPOSE: Final = 5


class Phi3VImages:
    """Scales an image into rows of tiles, filled up with white above and below, and adds all of them before as one.

    Images that are higher than wide are scaled lying.
    """

    KNOWN: Final = frozenset({"num_crops"})
    """Settings that a person may change."""

    def __init__(self, settings: Section, config: Section) -> None:
        self._pixels = Pixels.read(settings, _BILINEAR, CLIP_MEAN, CLIP_STD)
        settings.expect("resample", _BILINEAR, default=_BILINEAR)
        self._side = config.part("vision_config").positive("image_size", 336)
        self._most = settings.positive("num_crops", 1)

    def __call__(self, images: Sequence[Any], return_tensors: str) -> Arrays:
        """Return pixel_values [images, tiles, 3, side, side], the whole image first, filled up with zeros to the most
        tiles of an image, and image_sizes [images, (height, width)] of the grids."""
        made = [self._tiles(image) for image in images]
        most = max(len(tiles) for tiles, _ in made)
        filled = [np.pad(tiles, ((0, most - len(tiles)), *[(0, 0)] * 3)) for tiles, _ in made]
        return {"pixel_values": np.stack(filled), "image_sizes": np.array([size for _, size in made], np.int64)}

    def _tiles(self, image: Any) -> tuple[NDArray[np.float32], tuple[int, int]]:
        """Return [tiles, 3, side, side] with the whole image first, and the height and width of the grid."""
        side, is_high = self._side, image.width < image.height
        lying = image.transpose(_TRANSPOSE) if is_high else image
        ratio, columns = lying.width / lying.height, 1
        while (columns + 1) * math.ceil((columns + 1) / ratio) <= self._most:
            columns += 1
        width = columns * side
        height = max(1, int(width / ratio))
        pixels = np.full((-(-height // side) * side, width, 3), 255, np.uint8)
        top = (len(pixels) - height) // 2
        pixels[top : top + height] = np.asarray(lying.resize((width, height), _BILINEAR))
        if is_high:
            pixels = pixels.transpose(1, 0, 2)
        whole = self._pixels.array(pixels)
        return np.concatenate([bicubic(whole, side)[None], cut(whole, side)]), whole.shape[1:]
