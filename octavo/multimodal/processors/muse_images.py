"""The image processor of Muse Glimmer with Pillow and numpy; transformers has it with torchvision alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from octavo.config.section import Section
from octavo.multimodal.pixels import Arrays, Pixels, cut

_LANCZOS: Final = 1


class MuseImages:
    """Scales an image to whole tokens of nearly the same ratio of sides."""

    KNOWN: Final = frozenset({"max_image_tokens"})
    """Settings that a person may change."""

    def __init__(self, settings: Section, config: Section) -> None:
        self._pixels = Pixels.read(settings, _LANCZOS, [0.5], [0.5])
        vision = config.part("vision_config")
        self._patch: int = settings.expect("patch_size", vision.positive("patch_size", 14), default=14)
        self._merged: int = settings.expect("merge_size", vision.positive("merge_size", 2), default=2)
        self._times: int = settings.expect("temporal_patch_size", vision.positive("patch_temporal", 2), default=2)
        self._most = settings.positive("max_image_tokens", 4096)

    def __call__(self, images: Sequence[Any], return_tensors: str, max_image_tokens: int | None = None) -> Arrays:
        """Return pixel_values [patches of all images, frames of a patch · 3 · patch · patch], and image_grid_thw
        [images, (1, rows, columns)] of patches. max_image_tokens: most of an image, in place of the settings."""
        patches, grids = [], []
        for image in images:
            width, height = self._scaled_size(max_image_tokens or self._most, *image.size)
            pieces = cut(self._pixels.array(image.resize((width, height), self._pixels.resample)), self._patch)
            patches.append(np.tile(pieces.reshape(len(pieces), -1), self._times))  # the same for each frame of a patch
            grids.append((1, height // self._patch, width // self._patch))
        return {"pixel_values": np.concatenate(patches), "image_grid_thw": np.array(grids, np.int64)}

    def _scaled_size(self, most: int, width: int, height: int) -> tuple[int, int]:
        token = self._patch * self._merged
        rows, columns = height / token, width / token
        if rows * columns > most:
            ratio = columns / rows
            rows = (most / ratio) ** 0.5
            columns = rows * ratio
        sides = [(math.floor(each), math.ceil(each)) for each in (rows, columns)]
        # of those with the same ratio transformers takes the first one in the order of a set
        grids = [each for each in set(itertools.product(*sides)) if min(each) and math.prod(each) <= most]
        if not grids:
            grids = [(max(1, round(rows)), max(1, round(columns)))]
        best = min(grids, key=lambda grid: abs(grid[0] / grid[1] - height / width))
        return best[1] * token, best[0] * token
