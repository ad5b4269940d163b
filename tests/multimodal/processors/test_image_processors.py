"""Image processors of octavo beside those of transformers, which need torchvision: what they returned stands here."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from octavo.config.section import Section
from octavo.errors import CheckpointError, OctavoError, UnsupportedModel
from octavo.multimodal.image_writer import Context
from octavo.multimodal.image_writers import IMAGE_WRITERS
from octavo.multimodal.processors.image_processors import (
    OWN_PROCESSORS,
    Cohere2Images,
    DeepseekOcrImages,
    KimiImages,
    Lfm2VlImages,
    Llama4Images,
)
from octavo.multimodal.processors.molmo2_images import Molmo2Images
from octavo.multimodal.processors.muse_images import MuseImages
from octavo.multimodal.processors.phi4_images import Phi4Images
from tests.fakes.vision import image

# by width and height: Cohere 2's tiles; LFM2-VL's columns and rows of tiles, and patches of the whole image
SHAPES = {
    (40, 40): (1, (1, 1), (16, 16)),
    (513, 512): (3, (1, 1), (32, 32)),
    (512, 513): (3, (1, 1), (32, 32)),
    (1400, 600): (7, (5, 2), (20, 48)),
    (2000, 40): (5, (1, 1), (4, 114)),
    (1100, 1100): (10, (3, 3), (32, 32)),
    (700, 1900): (9, (2, 5), (52, 18)),
    (30, 900): (3, (1, 1), (88, 4)),
}


def section(**values: Any) -> Section:
    return Section(values, "config.json")


CONFIG = section(vision_config={"image_size": 512})


@pytest.mark.parametrize("size", SHAPES, ids=str)
def test_images_are_cut_as_transformers_cuts_them(size: tuple[int, int]) -> None:
    num_tiles, grid, patches = SHAPES[size]
    given = [image(0, *size)]
    assert len(Cohere2Images(section(), CONFIG)(given, "np")["pixel_values"]) == num_tiles
    made = Lfm2VlImages(section(), section())(given, "np")
    assert made["grid"].tolist() == [list(grid)]
    assert made["spatial_shapes"][-1].tolist() == list(patches)
    assert made["pixel_attention_mask"].sum(1).tolist() == made["spatial_shapes"].prod(1).tolist()


def scaled(given: Any, width: int, height: int, mode: str) -> Any:
    """What torchvision's resize computes, whose rounding differs by up to 2 of 255."""
    pixels = torch.tensor(np.asarray(given)).permute(2, 0, 1)[None]
    return torch.nn.functional.interpolate(pixels, (height, width), mode=mode, antialias=True)[0].float().numpy()


def test_pixels_are_those_of_torchs_filters() -> None:
    given = image(1, 700, 300)
    tile = Cohere2Images(section(image_mean=[0.5] * 3, image_std=[0.5] * 3), CONFIG)([given], "np")["pixel_values"]
    whole = scaled(given, 1024, 512, "bicubic")
    for found, expected in zip(
        tile, [whole[..., :512], whole[..., 512:], scaled(given, 512, 512, "bicubic")], strict=True
    ):
        assert np.abs(found * 127.5 + 127.5 - expected).max() < 2.01


def test_patches_are_those_of_transformers_in_their_order() -> None:
    from transformers.models.siglip2.image_processing_pil_siglip2 import convert_image_to_patches

    given = image(1, 300, 200)
    [found] = Lfm2VlImages(section(), section())([given], "np")["pixel_values"]
    expected = convert_image_to_patches(scaled(given, 320, 224, "bilinear"), 16)
    assert np.abs(found * 127.5 + 127.5 - expected).max() < 2.01


@pytest.mark.parametrize("size", [(40, 40), (641, 600), (1100, 700), (300, 2000), (999, 1001)])
def test_images_of_deepseek_ocr_are_cut_and_padded_as_those_of_the_second_are(size: tuple[int, int]) -> None:
    from transformers import DeepseekOcr2ImageProcessorPil

    given, sizes = [image(1, *size)], {"size": {"height": 512, "width": 512}, "tile_size": 320, "max_patches": 9}
    found = DeepseekOcrImages(section(**sizes), section())(given, "np")
    expected = DeepseekOcr2ImageProcessorPil(**sizes)(given, return_tensors="np")
    assert found.keys() - {"patches_grid"} == expected.keys()
    for name, values in expected.items():
        assert np.allclose(found[name], values, atol=1e-6)
    assert found["patches_grid"].prod() == max(1, found["num_local_patches"][0])


@pytest.mark.parametrize(
    ("size", "grid", "scaled_to"),
    [
        ((40, 40), [1, 1], (336, 336)),
        ((513, 512), [2, 2], (513, 512)),
        ((1400, 600), [2, 5], (1400, 600)),
        ((700, 1900), [6, 2], (672, 1824)),
        ((2319, 2319), [4, 4], (1344, 1344)),
    ],
)
def test_images_of_llama_4_are_cut_and_filled_up_as_transformers_does(
    size: tuple[int, int], grid: list[int], scaled_to: tuple[int, int]
) -> None:
    white = Image.new("RGB", size, (255, 255, 255))
    found = Llama4Images(section(), section(vision_config={"image_size": 336}))([white], "np")
    assert found["aspect_ratios"].tolist() == [grid]
    tiles = found["pixel_values"][: math.prod(grid), 0].reshape(*grid, 336, 336)
    assert len(found["pixel_values"]) == (1 if grid == [1, 1] else math.prod(grid) + 1)
    filled = (tiles == 1.0).transpose(0, 2, 1, 3).reshape(336 * grid[0], 336 * grid[1])
    assert (filled.any(0).sum(), filled.any(1).sum()) == scaled_to


def test_pixels_of_llama_4_are_normalised_in_bfloat16() -> None:
    given = Image.fromarray(np.arange(336 * 336 * 3, dtype=np.uint8).reshape(336, 336, 3))
    config = section(vision_config={"image_size": 336})
    [found] = Llama4Images(section(image_std=[0.3] * 3), config)([given], "np")["pixel_values"]
    pixels = torch.from_numpy(np.asarray(given).copy()).permute(2, 0, 1).to(torch.bfloat16) * (1 / 255)
    expected = (pixels - torch.tensor(0.5, dtype=torch.bfloat16)) / torch.tensor(0.3, dtype=torch.bfloat16)
    assert np.array_equal(found, expected.float().numpy())


@pytest.mark.parametrize(
    ("size", "scaled_to", "grid"),
    [((200, 100), (140, 70), (6, 10)), ((60, 30), (60, 30), (4, 6)), ((9, 300), (4, 140), (10, 2))],
)
def test_images_of_kimi_are_scaled_down_to_their_limits_and_filled_up(
    size: tuple[int, int], scaled_to: tuple[int, int], grid: tuple[int, int]
) -> None:
    given = image(0, *size)
    settings = section(size={"max_height": 10, "max_width": 10}, max_patches=50)
    made = KimiImages(settings, section())([given], return_tensors="np")
    (_, rows, columns), pixels = made["image_grid_thw"][0], made["pixel_values"]
    assert (rows, columns) == grid
    assert pixels.shape == (rows * columns, 3, 14, 14)
    whole = pixels.reshape(rows, columns, 3, 14, 14).transpose(2, 0, 3, 1, 4).reshape(3, rows * 14, columns * 14)
    width, height = scaled_to
    own = np.asarray(given.resize(scaled_to, 3), np.float32).transpose(2, 0, 1) / 127.5 - 1
    assert np.abs(whole[:, :height, :width] - own).max() < 1e-6
    assert (whole[:, height:] == -1).all()
    assert (whole[:, :, width:] == -1).all()


@pytest.mark.parametrize(
    ("size", "grid", "numbers"),
    [
        ((640, 480), (23, 23), (725, 55, 9_666_887_422)),
        ((30, 900), (14, 14), (392, 110, 1_093_121_862)),
        ((1201, 333), (14, 52), (924, 186, 16_313_082_390)),
        ((2000, 150), (14, 80), (1316, 215, 48_353_583_098)),
    ],
)
def test_images_of_molmo_2_are_cut_into_windows_as_transformers_does(
    size: tuple[int, int], grid: tuple[int, int], numbers: tuple[int, int, int]
) -> None:
    """The numbers are those of transformers' processor: vectors, places without a patch, and the sum of all places
    times their numbers from 1."""
    made = Molmo2Images(section(), section())([Image.new("RGB", size)], "np")
    assert made["image_grids"].tolist() == [[14, 14, *grid]]
    pooled = made["image_token_pooling"]
    assert (len(pooled), (pooled < 0).sum(), (pooled.ravel() * np.arange(1, 1 + pooled.size)).sum()) == numbers


def test_pixels_of_molmo_2_are_those_of_torch() -> None:
    given, settings = image(3, 301, 97), section(size={"height": 126, "width": 126}, overlap_margins=[0, 0])
    pixels = torch.tensor(np.asarray(given)).permute(2, 0, 1)[None].float()
    [whole, *windows] = Molmo2Images(settings, section())([given], "np")["pixel_values"]
    for found, width in ((whole[None], 126), (np.stack(windows), 378)):
        scaled = torch.nn.functional.interpolate(pixels, (126, width), mode="bilinear")[0].round() / 127.5 - 1
        cut = scaled.view(3, 9, 14, len(found), 9, 14).permute(3, 1, 4, 2, 5, 0).reshape(found.shape).numpy()
        far = np.abs(found - cut) > 1e-6  # halves, which float32 rounds up or down
        assert far.mean() < 1e-3
        assert np.abs(found - cut).max() < 0.0079


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((40, 40), (2, 2)),
        ((100, 100), (8, 8)),
        ((300, 200), (14, 22)),
        ((4000, 3000), (110, 146)),
        ((30, 900), (64, 2)),
        ((900, 30), (2, 64)),
    ],
)
def test_images_of_muse_glimmer_are_scaled_and_cut_as_transformers_does(
    size: tuple[int, int], grid: tuple[int, int]
) -> None:
    """The grids are those that transformers' processor returns."""
    given, (rows, columns) = image(2, *size), grid
    made = MuseImages(section(), section())([given], "np")
    assert made["image_grid_thw"].tolist() == [[1, rows, columns]]
    cut = made["pixel_values"].reshape(rows, columns, 2, 3, 14, 14)
    assert np.array_equal(cut[:, :, 0], cut[:, :, 1])
    whole = cut[:, :, 0].transpose(2, 0, 3, 1, 4).reshape(3, rows * 14, columns * 14)
    own = np.asarray(given.resize((columns * 14, rows * 14), 1), np.float32).transpose(2, 0, 1) / 127.5 - 1
    assert np.abs(whole - own).max() < 1e-6


def test_a_large_image_of_muse_glimmer_has_as_many_tokens_as_the_settings_allow() -> None:
    made = MuseImages(section(max_image_tokens=6), section())([image(0, 300, 200)], "np")
    assert made["image_grid_thw"].prod() // 4 <= 6
    with pytest.raises(UnsupportedModel, match="merge_size is 4, expected 2"):
        MuseImages(section(merge_size=4), section())


@pytest.mark.parametrize(
    ("size", "grid", "scaled_to"),
    [
        ((40, 40), (1, 1), (448, 448)),
        ((900, 500), (3, 2), (1344, 746)),
        ((448, 449), (1, 2), (448, 449)),
        ((1500, 3000), (3, 6), (1344, 2688)),
        ((60, 2600), (1, 6), (62, 2688)),
    ],
)
def test_images_of_phi_4_are_scaled_into_a_grid_and_filled_up_with_white(
    size: tuple[int, int], grid: tuple[int, int], scaled_to: tuple[int, int]
) -> None:
    given, (columns, rows) = image(2, *size), grid
    made = Phi4Images(section(max_patches=18), section())([given], "np")
    assert made["image_sizes"].tolist() == [[rows * 448, columns * 448]]
    [tiles], [mask] = made["image_pixel_values"], made["image_attention_mask"]
    whole = tiles[1:].reshape(rows, columns, 3, 448, 448).transpose(2, 0, 3, 1, 4).reshape(3, rows * 448, columns * 448)
    width, height = scaled_to
    own = np.asarray(given.resize(scaled_to, 2), np.float32).transpose(2, 0, 1) / 127.5 - 1
    assert np.abs(whole[:, :height, :width] - own).max() < 1e-6
    assert np.abs(whole[:, height:] - 1).max(initial=0) < 1e-6
    assert np.abs(whole[:, :, width:] - 1).max(initial=0) < 1e-6
    seen = mask[1:].reshape(rows, columns, 32, 32).transpose(0, 2, 1, 3).reshape(rows * 32, columns * 32)
    filled = [(side * 448 - length) // 14 for side, length in ((rows, height), (columns, width))]
    assert seen.any(1).sum() == rows * 32 - filled[0]
    assert seen.any(0).sum() == columns * 32 - filled[1]
    assert mask[0].all()
    small = torch.nn.functional.interpolate(torch.from_numpy(whole)[None], (448, 448), mode="bicubic")[0].numpy()
    assert np.abs(tiles[0] - small).max() < 2e-5


@pytest.mark.parametrize(
    ("size", "count"),
    [
        ((40, 40), 545),
        ((900, 500), 1596),
        ((448, 449), 562),
        ((60, 2600), 657),
        ((3000, 300), 1629),
        ((4000, 3000), 3393),
    ],
)
def test_prompts_have_as_many_tokens_for_an_image_of_phi_4_as_transformers_says(
    size: tuple[int, int], count: int
) -> None:
    made = Phi4Images(section(), section())([Image.new("RGB", size)], "np")
    context = Context(section(), {}, lambda text: [])
    assert IMAGE_WRITERS["phi4"].tokens(context, 5, made) == [5] * count


def test_images_of_phi_4_are_filled_up_to_the_most_tiles() -> None:
    config = section(vision_config={"image_size": 28, "patch_size": 7})
    made = Phi4Images(section(max_patches=4), config)([image(0, 28, 28), image(1, 56, 28)], "np")
    alone = Phi4Images(section(max_patches=4), config)([image(0, 28, 28)], "np")
    assert made["image_pixel_values"].shape == (2, 3, 3, 28, 28)
    assert np.array_equal(made["image_pixel_values"][:1, :2], alone["image_pixel_values"])
    assert not made["image_pixel_values"][0, 2].any()
    assert made["image_attention_mask"][0, 2].all()


@pytest.mark.parametrize(
    ("settings", "vision", "said"),
    [
        ({}, {"crop_size": 336}, "crop_size is 336, expected image_size, which is 448"),
        ({}, {"image_size": 434}, "image_size is 434, expected a multiple of two patches, which are 28 pixels"),
        ({"patch_size": 16}, {}, "patch_size is 16, expected 14"),
    ],
)
def test_sizes_of_phi_4_that_do_not_fit_are_refused(
    settings: dict[str, Any], vision: dict[str, Any], said: str
) -> None:
    with pytest.raises(OctavoError, match=said):
        Phi4Images(section(**settings), section(vision_config=vision))


def test_an_image_far_longer_than_wide_keeps_a_row_of_pixels() -> None:
    made = DeepseekOcrImages(section(size={"height": 64, "width": 64}), section())([image(0, 200, 1)], "np")
    assert made["pixel_values"].shape == (1, 3, 64, 64)


REFUSED: list[tuple[str, dict[str, Any], type[OctavoError], str]] = [
    ("Lfm2Vl", {"encoder_patch_size": 14}, UnsupportedModel, "encoder_patch_size is 14, expected 16"),
    ("Lfm2Vl", {"downsample_factor": 4}, UnsupportedModel, "downsample_factor is 4, expected 2"),
    ("Lfm2Vl", {"tile_size": 500}, CheckpointError, "tile_size is 500, expected a multiple of .* 32"),
    ("Lfm2Vl", {"do_pad": False}, UnsupportedModel, "do_pad is false, expected true"),
    ("Llama4", {"size": {"height": 336, "width": 336}}, CheckpointError, "size is .*, expected .*512 x 512"),
    ("Cohere2Vision", {"resample": 9}, UnsupportedModel, "resample is 9, expected 0 or 1"),
    ("Cohere2Vision", {"size": {"height": 256, "width": 256}}, CheckpointError, "size is .*, expected .*512 x 512"),
    ("Cohere2Vision", {"rescale_factor": 0.0}, CheckpointError, "rescale_factor is 0.0, expected a number above 0"),
]


@pytest.mark.parametrize(("family", "settings", "error", "said"), REFUSED)
def test_unfit_settings_are_refused(family: str, settings: dict[str, Any], error: type[OctavoError], said: str) -> None:
    with pytest.raises(error, match=said):
        OWN_PROCESSORS[f"{family}ImageProcessor"](section(**settings), CONFIG)
