"""Image processors that transformers has with torchvision alone, here with Pillow and numpy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from octavo.config.section import Section
from octavo.multimodal.pixels import CLIP_MEAN, CLIP_STD, Arrays, Pixels, closest_grid, cut, to_bfloat16
from octavo.multimodal.processors.deepseek_vl2_images import DeepseekVl2Images
from octavo.multimodal.processors.minicpm_images import MiniCPMImages
from octavo.multimodal.processors.molmo2_images import Molmo2Images
from octavo.multimodal.processors.muse_images import MuseImages
from octavo.multimodal.processors.nemotron_images import NemotronImages, NemotronSquares
from octavo.multimodal.processors.nemotron_tiles import NemotronTiles
from octavo.multimodal.processors.phi3v_images import Phi3VImages
from octavo.multimodal.processors.phi4_images import Phi4Images
from octavo.multimodal.processors.step_images import StepImages


class Cohere2Images:
    """Cuts an image into tiles of one size and adds the whole image behind them, unless it is one tile."""

    KNOWN: Final = frozenset({"crop_to_patches", "max_patches", "min_patches"})
    """Settings that a person may change."""

    def __init__(self, settings: Section, config: Section) -> None:
        self._pixels = Pixels.read(settings, 3, CLIP_MEAN, CLIP_STD)
        size = settings.part("size")
        self._width, self._height = size.positive("width", 512), size.positive("height", 512)
        self._most = settings.positive("max_patches", 12) if settings.bool("crop_to_patches", True) else 1
        vision = config.part("vision_config")
        side = vision.positive("image_size", 224)
        if (self._width, self._height) != (side, side):
            raise settings.error("size", f"the image_size of vision_config, {side} x {side}")

    def __call__(self, images: Sequence[Any], return_tensors: str) -> Arrays:
        """Return pixel_values [tiles of all images, 3, height, width]."""
        tiles = []
        for image in images:
            columns, rows = self._grid(*image.size)
            tiles += self._pixels.tiles(image, columns, rows, self._width, self._height)
            if columns * rows > 1:
                tiles += self._pixels.tiles(image, 1, 1, self._width, self._height)
        return {"pixel_values": np.stack([self._pixels.array(tile) for tile in tiles])}

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the columns and rows that scale an image up least, or else down least; of several the fewest tiles."""
        most = self._most
        grids = [(columns, rows) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)]
        grids.sort(key=lambda grid: grid[0] * grid[1])

        def scale(grid: tuple[int, int]) -> float:
            return min(grid[0] * self._height / width, grid[1] * self._height / height)

        enlarging = [grid for grid in grids if scale(grid) >= 1]
        return min(enlarging, key=scale) if enlarging else max(grids, key=scale)


class Llama4Images:
    """Scales an image into a grid of tiles, filled up with black, and adds the whole image behind several of them."""

    KNOWN: Final = frozenset({"max_patches", "resize_to_max_canvas"})

    def __init__(self, settings: Section, config: Section) -> None:
        self._pixels = Pixels.read(settings, 2, [0.5], [0.5], to_bfloat16)
        size = settings.part("size")
        self._side, self._most = size.positive("height", 336), settings.positive("max_patches", 16)
        self._is_enlarged = settings.bool("resize_to_max_canvas", False)
        side = config.part("vision_config").positive("image_size", 448)
        if (self._side, size.positive("width", 336)) != (side, side):
            raise settings.error("size", f"the image_size of vision_config, {side} x {side}")

    def __call__(self, images: Sequence[Any], return_tensors: str) -> Arrays:
        """Return pixel_values [tiles of all images, 3, side, side] and aspect_ratios [images, (rows, columns)]."""
        tiles: list[Any] = []
        grids = [self._grid(*image.size) for image in images]
        for image, (columns, rows) in zip(images, grids, strict=True):
            filled = self._filled(image, columns * self._side, rows * self._side)
            tiles += self._pixels.tiles(filled, columns, rows, self._side, self._side)
            if columns * rows > 1:
                tiles += self._pixels.tiles(image, 1, 1, self._side, self._side)
        ratios = np.array([(rows, columns) for columns, rows in grids], np.int64)
        return {"pixel_values": np.stack([self._pixels.array(tile) for tile in tiles]), "aspect_ratios": ratios}

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the columns and rows that scale an image up least, or else down least; of several the fewest tiles."""
        most = self._most
        scales: dict[tuple[int, int], Any] = {}
        for columns in range(1, most + 1):
            for rows in range(1, most // columns + 1):
                sides = np.float32(columns * self._side), np.float32(rows * self._side)
                scales[columns, rows] = min(sides[0] / np.float32(width), sides[1] / np.float32(height))
        enlarging = [scale for scale in scales.values() if scale >= 1]
        best = (max if self._is_enlarged else min)(enlarging) if enlarging else max(scales.values())
        return min((grid for grid, scale in scales.items() if scale == best), key=math.prod)

    def _filled(self, image: Any, width: int, height: int) -> Any:
        """Return an image of this size, on whose upper left the given one is, scaled with its ratio of sides."""
        given, most = (image.width, image.height), [width, height]
        kinds: list[type[np.floating[Any]]] = [np.float32, np.float32]
        for side, own in enumerate(given):
            if not self._is_enlarged and (wanted := max(own, self._side)) <= most[side]:
                # in transformers sides of tiles are float32, and others exact
                most[side], kinds[side] = wanted, np.float64
        scales = [kind(end) / kind(own) for kind, end, own in zip(kinds, most, given, strict=True)]
        common = np.float64 if kinds == [np.float64] * 2 else np.float32
        first = 0 if common(scales[0]) < common(scales[1]) else 1
        scaled = min(math.floor(kinds[first](given[1 - first]) * scales[first]), most[1 - first])
        size = (most[0], max(scaled, 1)) if first == 0 else (max(scaled, 1), most[1])
        return image.resize(size, self._pixels.resample).crop((0, 0, width, height))


class Lfm2VlImages:
    """Scales an image to whole tokens, or cuts a large one into tiles and adds the scaled one behind them."""

    KNOWN: Final = frozenset({"do_image_splitting", "max_image_tokens", "max_tiles", "min_image_tokens", "min_tiles"})

    def __init__(self, settings: Section, config: Section) -> None:
        self._pixels = Pixels.read(settings, 2, [0.5], [0.5])
        vision = config.part("vision_config")
        self._patch: int = settings.expect("encoder_patch_size", vision.positive("patch_size", 16), default=16)
        factor: int = settings.expect("downsample_factor", config.positive("downsample_factor", 2), default=2)
        self._token: int = self._patch * factor
        self._tile = settings.positive("tile_size", 512)
        if self._tile % self._token:
            raise settings.error("tile_size", f"a multiple of the pixels of a token, {self._token}")
        self._tiles = settings.positive("min_tiles", 2), settings.positive("max_tiles", 10)
        if not settings.bool("do_image_splitting", True):
            self._tiles = 1, 1
        self._counts = settings.positive("min_image_tokens", 64), settings.positive("max_image_tokens", 256)
        self._tolerance = settings.positive_float("max_pixels_tolerance", 2.0)
        self._has_thumbnail = settings.bool("use_thumbnail", True)

    def __call__(self, images: Sequence[Any], return_tensors: str) -> Arrays:
        """Return what SigLIP 2 reads, filled up to the longest piece, and the grid of tiles of each image.

        pixel_values [pieces, patches, channels of a patch], pixel_attention_mask [pieces, patches], spatial_shapes
        [pieces, (rows, columns)] of patches.
        """
        grids = [self._grid(*image.size) for image in images]
        pieces = [piece for image, grid in zip(images, grids, strict=True) for piece in self._pieces(image, *grid)]
        # a pixel of a patch has its colors beside each other
        cuts = [cut(self._pixels.array(piece), self._patch).transpose(0, 2, 3, 1) for piece in pieces]
        patches = [each.reshape(len(each), -1) for each in cuts]
        longest = max(len(each) for each in patches)
        filled = [np.pad(each, ((0, longest - len(each)), (0, 0))) for each in patches]
        shapes = [(piece.height // self._patch, piece.width // self._patch) for piece in pieces]
        return {
            "pixel_values": np.stack(filled),
            "pixel_attention_mask": np.stack([np.arange(longest) < len(each) for each in patches]).astype(np.int64),
            "spatial_shapes": np.array(shapes, np.int64),
            "grid": np.array(grids, np.int64),
        }

    def _pieces(self, image: Any, columns: int, rows: int) -> list[Any]:
        """Return the tiles of an image, and behind several of them the scaled image."""
        scaled = self._pixels.tiles(image, 1, 1, *self._scaled_size(*image.size))
        if columns * rows == 1:
            return scaled
        return self._pixels.tiles(image, columns, rows, self._tile, self._tile) + scaled * self._has_thumbnail

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Return columns and rows of tiles: (1, 1) for an image that is not large, else the result of
        `closest_grid`."""
        least, most = self._tiles
        area = math.prod(max(self._patch, self._rounded(each)) for each in (width, height))
        if most == 1 or area <= self._counts[1] * self._token**2 * self._tolerance:
            return 1, 1
        return closest_grid(width, height, least, most, self._tile)

    def _scaled_size(self, width: int, height: int) -> tuple[int, int]:
        """Return (width, height) of whole tokens, as many as the settings allow, with nearly the same ratio."""
        token = self._token
        least, most = (count * token**2 for count in self._counts)
        sides = [max(token, self._rounded(each)) for each in (width, height)]
        if math.prod(sides) > most:
            ratio = math.sqrt(width * height / most)
            sides = [max(token, math.floor(each / ratio / token) * token) for each in (width, height)]
        elif math.prod(sides) < least:
            ratio = math.sqrt(least / (width * height))
            sides = [math.ceil(each * ratio / token) * token for each in (width, height)]
        return sides[0], sides[1]

    def _rounded(self, side: int) -> int:
        return round(side / self._token) * self._token


class DeepseekOcrImages:
    """Pads an image to a square, and cuts a large one into tiles beside that."""

    KNOWN: Final = frozenset({"max_patches", "min_patches"})

    def __init__(self, settings: Section, config: Section) -> None:
        self._pixels = Pixels.read(settings, 3, [0.5], [0.5])
        size = settings.part("size")
        self._side, self._tile = size.positive("height", 1024), settings.positive("tile_size", 640)
        self._tiles = settings.positive("min_patches", 2), settings.positive("max_patches", 9)
        self._is_cut = settings.bool("crop_to_patches", True)

    def __call__(self, images: Sequence[Any], return_tensors: str) -> Arrays:
        """Return pixel_values [images, 3, side, side], pixel_values_local [tiles, 3, tile, tile] where there are any,
        num_local_patches [images], and patches_grid [images, (columns, rows)]."""
        grids = [self._grid(*image.size) for image in images]
        tiles = [
            self._pixels.array(tile)
            for image, grid in zip(images, grids, strict=True)
            for tile in (self._pixels.tiles(image, *grid, self._tile, self._tile) if grid[0] else [])
        ]
        return {
            "pixel_values": np.stack([self._pixels.array(self._square(image)) for image in images]),
            **({"pixel_values_local": np.stack(tiles)} if tiles else {}),
            "num_local_patches": np.array([math.prod(grid) for grid in grids], np.int64),
            "patches_grid": np.array([(max(1, columns), max(1, rows)) for columns, rows in grids], np.int64),
        }

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        if not self._is_cut or max(width, height) <= self._tile:
            return 0, 0
        return closest_grid(width, height, *self._tiles, self._tile)

    def _square(self, image: Any) -> NDArray[np.uint8]:
        """Return an image scaled to the longer side, in the middle of gray, [side, side, 3]."""
        scale = self._side / max(image.size)
        width, height = (max(1, round(each * scale)) for each in image.size)
        left, top = (self._side - width) // 2, (self._side - height) // 2
        square = np.full((self._side, self._side, 3), 127, np.uint8)
        square[top : top + height, left : left + width] = image.resize((width, height), self._pixels.resample)
        return square


class KimiImages:
    """Scales an image down to as many patches as the settings allow, and fills it up with black to whole tokens."""

    KNOWN: Final = frozenset[str]()

    def __init__(self, settings: Section, config: Section) -> None:
        self._pixels = Pixels.read(settings, 3, [0.5], [0.5])
        size = settings.part("size")
        self._longest, self._most = size.positive("max_height", 512), settings.positive("max_patches", 16384)
        vision = config.part("vision_config")
        self._patch: int = settings.expect("patch_size", vision.positive("patch_size", 14), default=14)
        self._merged: int = settings.expect("merge_size", 2, default=2)

    def __call__(self, images: Sequence[Any], return_tensors: str) -> Arrays:
        """Return pixel_values [patches of all images, 3, patch, patch], image_grid_thw [images, (1, rows, columns)]."""
        size, token = self._patch, self._patch * self._merged
        patches, grids = [], []
        for image in images:
            scaled = image.resize(self._scaled_size(*image.size), self._pixels.resample)
            width, height = (-(-side // token) * token for side in scaled.size)
            pixels = self._pixels.array(scaled.crop((0, 0, width, height)))
            patches.append(cut(pixels, size))
            grids.append((1, height // size, width // size))
        return {"pixel_values": np.concatenate(patches), "image_grid_thw": np.array(grids, np.int64)}

    def _scaled_size(self, width: int, height: int) -> tuple[int, int]:
        longest = self._longest * self._patch
        num_patches = max(1, width // self._patch) * max(1, height // self._patch)
        scale = min(1.0, math.sqrt(self._most / num_patches), longest / width, longest / height)
        return min(longest, max(1, int(width * scale))), min(longest, max(1, int(height * scale)))


class KimiVlImages(KimiImages):
    """Scales images for Kimi-VL as `KimiImages` does, and rounds each step of normalising as its release does."""

    def __init__(self, settings: Section, config: Section) -> None:
        super().__init__(settings, config)
        self._pixels = Pixels.in_steps(settings, 3)


_Own = (
    Cohere2Images
    | DeepseekOcrImages
    | DeepseekVl2Images
    | KimiImages
    | Lfm2VlImages
    | Llama4Images
    | MiniCPMImages
    | Molmo2Images
    | MuseImages
    | NemotronImages
    | NemotronTiles
    | Phi3VImages
    | Phi4Images
    | StepImages
)

OWN_PROCESSORS: Final[Mapping[str, type[_Own]]] = {
    "Cohere2VisionImageProcessor": Cohere2Images,
    "DeepseekOcrImageProcessor": DeepseekOcrImages,
    "DeepseekVLV2ImageProcessor": DeepseekVl2Images,
    "KimiVLImageProcessor": KimiVlImages,
    "Kimi_K25ImageProcessor": KimiImages,
    "Lfm2VlImageProcessor": Lfm2VlImages,
    "Llama4ImageProcessor": Llama4Images,
    "MiniCPMVImageProcessor": MiniCPMImages,
    "Molmo2ImageProcessor": Molmo2Images,
    "MuseGlimmerImageProcessor": MuseImages,
    "NemotronH_Omni_Reasoning_V3ImageProcessor": NemotronImages,
    "NemotronNanoVLV2ImageProcessor": NemotronSquares,
    "LlamaNemotronVLImageProcessor": NemotronTiles,
    "Phi3VImageProcessor": Phi3VImages,
    "Phi4MultimodalImageProcessor": Phi4Images,
    "Step3p7ImageProcessor": StepImages,
}
"""The classes by transformers' names. Called with settings and config.json, they raise CheckpointError or
UnsupportedModel."""
