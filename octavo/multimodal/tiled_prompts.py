"""How families that cut images into tiles write them into prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from octavo.multimodal.image_writer import Arrays, Context


def pinned_prompt(context: Context, token: int, arrays: Arrays) -> list[int]:
    """Return the whole image, then the rows of a larger one without padding, each with a vector for its end."""
    side = context.vision.positive("image_size") // context.vision.positive("patch_size")
    with_class = context.config.values.get("vision_feature_select_strategy") == "full" and not _is_onevision(context)
    if (rate := context.config.values.get("downsample_rate")) is not None:  # Granite, whose windows leave the class out
        side, with_class = int(side * Fraction(str(rate))), False
    height, width = (int(each) for each in arrays["image_sizes"][0])
    pinned = [(int(rows), int(columns)) for rows, columns in context.settings["image_grid_pinpoints"]]
    tile_height, tile_width = arrays["pixel_values"].shape[-2:]
    best_height, best_width = _best_size(height, width, pinned)
    rows, columns = side * (best_height // tile_height), side * (best_width // tile_width)
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    if _is_onevision(context):
        most = int(str(context.config.values.get("vision_aspect_ratio", "anyres_max_9")).removeprefix("anyres_max_"))
        ratio = math.sqrt(rows * columns / (most * side**2))
        if ratio > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
    return [token] * (side * side + with_class + rows * (columns + 1))


def _is_onevision(context: Context) -> bool:
    return str(context.config.values.get("model_type")) in ("bee", "llava_onevision")


def _best_size(height: int, width: int, sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the size that keeps most pixels of an image; of equal ones, that with the fewest padding pixels."""

    def kept(size: tuple[int, int]) -> tuple[int, int]:
        scale = min(size[1] / width, size[0] / height)
        pixels = min(int(width * scale) * int(height * scale), width * height)
        return pixels, pixels - size[0] * size[1]

    return max(sizes, key=kept)


def internvl_prompt(context: Context, token: int, arrays: Arrays) -> list[int]:
    """Return all tiles of an image, then its thumbnail."""
    count = len(arrays["pixel_values"]) * context.config.positive("image_seq_length", 256)
    return [*context.encode("<img>"), *[token] * count, *context.encode("</img>")]


def nvlm_prompt(context: Context, token: int, arrays: Arrays) -> list[int]:
    """Return all tiles of an image, each after its number, then its thumbnail; an image of one tile is its
    thumbnail."""
    vectors = [token] * context.config.positive("image_seq_length", 256)
    names = [*(f"<tile_{number}>" for number in range(1, len(arrays["pixel_values"]))), "<tile_global_thumbnail>"]
    names[0] = f"<Image>{names[0]}"  # whose tokens follow from both texts
    return [*(each for name in names for each in (*context.encode(name), *vectors)), *context.encode("</Image>")]


def smolvlm_prompt(context: Context, token: int, arrays: Arrays) -> list[int]:
    """Return the tiles by rows and columns, each after its name, then the whole image."""
    size = context.vision.positive("image_size") // context.vision.positive("patch_size")
    vectors = [token] * (size // context.config.positive("scale_factor", 2)) ** 2
    rows, columns = (int(arrays[name].reshape(-1)[0]) for name in ("rows", "cols"))
    around = "<fake_token_around_image>"
    written: list[int] = []
    for row in range(rows):
        for column in range(columns):
            line_end = "\n" if row and not column else ""
            written += [*context.encode(f"{line_end}{around}<row_{row + 1}_col_{column + 1}>"), *vectors]
    behind = "\n\n" if rows else ""
    return [*written, *context.encode(f"{behind}{around}<global-img>"), *vectors, *context.encode(around)]


def lfm2_prompt(context: Context, token: int, arrays: Arrays) -> list[int]:
    """Return the tiles by rows and columns, each after its name, then the whole image if there are several tiles."""
    factor = context.config.positive("downsample_factor", 2)
    counts = [int(height // factor) * int(width // factor) for height, width in arrays["spatial_shapes"]]
    columns, rows = (int(each) for each in arrays["grid"][0])
    places = [(row, column) for row in range(1, rows + 1) for column in range(1, columns + 1)]
    names = [f"<|img_row_{row}_col_{column}|>" for row, column in places] if rows * columns > 1 else [""]
    written = context.encode("<|image_start|>")
    for name, count in zip([*names, "<|img_thumbnail|>"], counts, strict=False):
        written += [*context.encode(name), *[token] * count]
    return [*written, *context.encode("<|image_end|>")]


def cohere2_prompt(context: Context, token: int, arrays: Arrays) -> list[int]:
    """Return the tiles, with a line break after each."""
    side = context.vision.positive("image_size", 224) // context.vision.positive("patch_size", 16)
    tile = [token] * (side // context.config.positive("downsample_factor", 2)) ** 2
    lines = [*tile, *context.encode("<|IMG_LINE_BREAK|>")] * len(arrays["pixel_values"])
    return [*context.encode("<|START_OF_IMG|>"), *lines, *context.encode("<|END_OF_IMG|>")]


def aya_prompt(context: Context, token: int, arrays: Arrays) -> list[int]:
    """Return the tiles, each after its number, then the whole image."""
    side = context.vision.positive("image_size", 384) // context.vision.positive("patch_size", 14)
    tile = [token] * (side // context.config.positive("downsample_factor", 2)) ** 2
    numbers = [f"_{number}" for number in range(1, len(arrays["pixel_values"]))]
    tiles = [each for name in (*numbers, "_GLOBAL") for each in (*context.encode(f"TILE{name}"), *tile)]
    return [*context.encode("<|START_OF_IMG|>"), *tiles, *context.encode("<|END_OF_IMG|>")]


def llama4_prompt(context: Context, token: int, arrays: Arrays) -> list[int]:
    """Return the tiles by rows and columns, then the whole image if there are several tiles."""
    vision, (rows, columns) = context.vision, (int(each) for each in arrays["aspect_ratios"][0])
    side = vision.positive("image_size", 448) // vision.positive("patch_size", 14)
    tile = [token] * int(side * side * vision.positive_float("pixel_shuffle_ratio", 0.5) ** 2)
    between, behind = context.encode("<|tile_x_separator|>"), context.encode("<|tile_y_separator|>")
    row = [*[*tile, *between] * (columns - 1), *tile, *behind]
    whole = [*context.encode("<|image|>"), *tile]
    tiles = row * rows if rows * columns > 1 else []
    return [*context.encode("<|image_start|>"), *tiles, *whole, *context.encode("<|image_end|>")]
