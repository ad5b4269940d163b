"""Images of Molmo 2: what its processor makes of them, with numpy (transformers has it with torchvision alone), and how
they are written into prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from octavo.config.media.image_fits import MOST_TILES
from octavo.config.section import Section, read_section
from octavo.multimodal.image_writer import Context
from octavo.multimodal.pixels import Arrays, Pixels

_BILINEAR: Final = 2
_IDS: Final = {
    "low_res_image_start_token_id": 151_940,
    "image_start_token_id": 151_936,
    "image_end_token_id": 151_937,
    "image_col_id": 151_939,
}


class Molmo2Images:
    """Scales an image to a square, and to a canvas of windows that overlap; neighbouring patches become one vector."""

    KNOWN: Final = frozenset({"max_crops"})
    """Settings that a person may change."""

    def __init__(self, settings: Section, config: Section) -> None:
        settings.expect("resample", _BILINEAR, default=_BILINEAR)
        self._pixels = Pixels.read(settings, _BILINEAR, [0.5], [0.5])
        self._side, self._patch = settings.part("size").positive("height", 378), settings.positive("patch_size", 14)
        self._most = settings.positive("max_crops", 8)
        if self._most > MOST_TILES:
            raise settings.error("max_crops", f"at most {MOST_TILES}")
        patches = self._side // self._patch
        self._margins = _pair(settings, "overlap_margins", [4, 4], 0)
        self._window = patches - sum(self._margins)
        if self._window < 1:
            raise settings.error("overlap_margins", f"a sum below the {patches} patches of a side")
        self._pool = _pair(settings, "pooling_size", [2, 2], 1)

    def __call__(self, images: Sequence[Any], return_tensors: str) -> Arrays:
        """Return pixel_values [1 + windows of all images, patches, channels of a patch], image_token_pooling [vectors,
        patches of a vector] of numbers of patches, -1 for none, and image_grids [images, (rows, columns of the square,
        rows, columns of the canvas)] of vectors."""
        pieces, pooled, grids, num_patches = [], [], [], 0
        side, per_side = self._side, self._side // self._patch
        for image in images:
            array = np.asarray(image, np.uint8)
            rows, columns = self._tiling(image.height, image.width)
            step, margin = self._window * self._patch, sum(self._margins) * self._patch
            canvas = self._pixels.array(_scaled(array, rows * step + margin, columns * step + margin))
            corners = [(row * step, column * step) for row in range(rows) for column in range(columns)]
            cut = [self._pixels.array(_scaled(array, side, side))]
            cut += [canvas[:, y : y + side, x : x + side] for y, x in corners]
            first = _pooled(np.arange(per_side**2).reshape(per_side, per_side) + num_patches, *self._pool)
            second = _pooled(self._numbers(rows, columns) + num_patches + per_side**2, *self._pool)
            pieces += [self._patches(each) for each in cut]
            pooled += [each.reshape(-1, each.shape[2]) for each in (first, second)]
            grids.append((*first.shape[:2], *second.shape[:2]))
            num_patches += len(cut) * per_side**2
        return {
            "pixel_values": np.stack(pieces),
            "image_token_pooling": np.concatenate(pooled).astype(np.int64),
            "image_grids": np.array(grids, np.int64),
        }

    def _tiling(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of windows to which an image is scaled up least, or else down least; of equal
        ones the fewest, then the fewest rows."""
        most, window, margin = self._most, self._window * self._patch, sum(self._margins) * self._patch
        grids = [(rows, columns) for rows in range(1, most + 1) for columns in range(1, most // rows + 1)]
        grids.sort(key=lambda grid: (grid[0] * grid[1], grid[0]))
        given = np.array([height - margin, width - margin], np.float32)
        with np.errstate(divide="ignore"):  # an image that is all margin
            scales = (np.array(grids, np.float32) * np.float32(window) / given).min(axis=1)
        if (scales < 1).all():
            return grids[int(scales.argmax())]
        return grids[int(np.where(scales < 1, np.float32(10e9), scales).argmin())]

    def _numbers(self, rows: int, columns: int) -> NDArray[np.int64]:
        """Return the numbers of the patches of a canvas, [rows, columns] of patches: each from the window that has it
        farther from its edge."""
        side, (before, behind) = self._side // self._patch, self._margins
        numbers = np.arange(rows * columns * side * side).reshape(rows, columns, side, side)

        def kept(place: int, count: int) -> slice:
            return slice(before if place else 0, side if place == count - 1 else side - behind)

        lines = [
            [numbers[row, column, kept(row, rows), kept(column, columns)] for column in range(columns)]
            for row in range(rows)
        ]
        return np.block(lines)

    def _patches(self, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return [patches, patch · patch · 3] of [3, side, side], row by row."""
        size, count = self._patch, self._side // self._patch
        cut = pixels.reshape(3, count, size, count, size).transpose(1, 3, 2, 4, 0)
        return cut.reshape(count * count, size * size * 3)


def _pair(settings: Section, name: str, default: list[int], least: int) -> list[int]:
    found = settings.values.get(name, default)
    if not isinstance(found, list) or len(found) != 2 or not all(type(e) is int and e >= least for e in found):
        raise settings.error(name, f"two integers of at least {least}")
    return found


def _pooled(numbers: NDArray[np.int64], height: int, width: int) -> NDArray[np.int64]:
    """Return [rows, columns, height · width] of [rows, columns] of patches, filled up on both sides with -1."""
    lacking = [-count % size for count, size in zip(numbers.shape, (height, width), strict=True)]
    around = [(each // 2, each - each // 2) for each in lacking]
    filled = np.pad(numbers, around, constant_values=-1)
    rows, columns = filled.shape[0] // height, filled.shape[1] // width
    cut = filled.reshape(rows, height, columns, width).transpose(0, 2, 1, 3)
    return cut.reshape(rows, columns, height * width)


def _scaled(image: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Return [height, width, 3] of [.., .., 3], as torch interpolates linearly without a filter against aliases."""
    (top, below, down), (left, right, along) = (
        _weights(given, wanted) for given, wanted in zip(image.shape, (height, width), strict=False)
    )
    made = np.empty((height, width, image.shape[2]), np.uint8)
    near, far = np.float32(1) - along[:, None], along[:, None]

    def line(row: int) -> NDArray[np.float32]:
        given = image[row].astype(np.float32)
        mixed: NDArray[np.float32] = near * given[left] + far * given[right]
        return mixed

    for row in range(height):  # one at a time: a canvas is large
        mixed = (np.float32(1) - down[row]) * line(top[row]) + down[row] * line(below[row])
        made[row] = np.rint(mixed).clip(0, 255)
    return made


def _weights(given: int, wanted: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Return for each place of a new line the two places of the given one, and the weight of the second."""
    scale = np.float32(given) / np.float32(wanted)
    places = np.maximum(scale * (np.arange(wanted, dtype=np.float32) + np.float32(0.5)) - np.float32(0.5), 0)
    first = np.minimum(places.astype(np.int64), given - 1)
    share = np.clip(places - first.astype(np.float32), 0, 1).astype(np.float32)
    return first, np.minimum(first + 1, given - 1), share


def molmo2_tokens(context: Context, token: int, arrays: Mapping[str, NDArray[Any]]) -> list[int]:
    """Return the rows of the square, then those of the canvas, each between tokens that begin and end it."""
    low_rows, low_columns, rows, columns = (int(each) for each in arrays["image_grids"][0])
    settings = context.settings
    low_begin, begin, end, column = (context.config.positive(name, default) for name, default in _IDS.items())
    first, second = (
        ([token] * width + [column] * bool(settings[name])) * height
        for width, height, name in (
            (low_columns, low_rows, "use_single_crop_col_tokens"),
            (columns, rows, "image_use_col_tokens"),
        )
    )
    return [low_begin if settings["use_single_crop_start_token"] else begin, *first, end, begin, *second, end]


def molmo2_prompt(context: Context, marker: int, token_ids: Sequence[int]) -> list[int]:
    """Return a prompt with the token that begins texts, where it lacks that."""
    text = _beginning(context.path)
    begin = context.encode(text) if text else []
    return [*([] if [*token_ids[: len(begin)]] == begin else begin), *token_ids]


@cache
def _beginning(path: Path) -> str:
    """Return the text of the token that begins texts: the one that ends them, unless the tokenizer has another."""
    stated = read_section(path / "tokenizer_config.json", may_lack=True).values
    for name in ("bos_token", "eos_token"):
        found = stated.get(name)
        found = found.get("content") if isinstance(found, dict) else found
        if isinstance(found, str) and found:
            return found
    return ""
