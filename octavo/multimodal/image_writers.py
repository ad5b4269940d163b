"""How families of models that read images write one into a prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from numpy.typing import NDArray

from octavo.config.media.image_fits import num_queries
from octavo.config.section import Section
from octavo.errors import InvalidRequest
from octavo.multimodal.arranged_prompts import blip2_prompt, ernie_prompt, paligemma_prompt
from octavo.multimodal.image_writer import Arrays, Context, ImageWriter, first_positive
from octavo.multimodal.processors.molmo2_images import molmo2_prompt, molmo2_tokens
from octavo.multimodal.tiled_prompts import (
    aya_prompt,
    cohere2_prompt,
    internvl_prompt,
    lfm2_prompt,
    llama4_prompt,
    nvlm_prompt,
    pinned_prompt,
    smolvlm_prompt,
)


def _llava(context: Context, token: int, arrays: Arrays) -> list[int]:
    if context.vision.values.get("model_type") == "pixtral":
        return _pixtral(context, token, arrays)
    patch = context.vision.positive("patch_size")
    height, width = arrays["pixel_values"].shape[-2:]
    with_class = context.config.values.get("vision_feature_select_strategy", "default") == "full"
    return [token] * ((height // patch) * (width // patch) + with_class)


def _aria(context: Context, token: int, arrays: Arrays) -> list[int]:
    pixels = arrays["pixel_values"]
    return [token] * (len(pixels) * num_queries(context.config, int(pixels.shape[-1])))


def _blip2(context: Context, token: int, arrays: Arrays) -> list[int]:
    return [token] * context.config.positive("num_query_tokens", 32)


def _janus(context: Context, token: int, arrays: Arrays) -> list[int]:
    vectors = _llava(context, token, arrays)
    return [*context.encode("<begin_of_image>"), *vectors, *context.encode("<end_of_image>")]


def _pixtral(context: Context, token: int, arrays: Arrays) -> list[int]:
    """Return the rows of an image: each ends with a line token, the last one with another token."""
    patch = context.vision.positive("patch_size") * context.config.positive("spatial_merge_size", 1)
    height, width = (int(each) // patch for each in arrays["image_sizes"][0])
    (line_end,), (end,) = context.encode("[IMG_BREAK]"), context.encode("[IMG_END]")
    return [*([*[token] * width, line_end] * height)[:-1], end]


def _lighton(context: Context, token: int, arrays: Arrays) -> list[int]:
    patch = context.vision.positive("patch_size") * context.config.positive("spatial_merge_size", 2)
    height, width = (int(each) // patch for each in arrays["image_sizes"][0])
    return [token] * (height * width)


def _qwen_grid(context: Context, arrays: Arrays) -> tuple[int, int]:
    merged = context.vision.positive("spatial_merge_size", 2)
    _, height, width = (int(each) for each in arrays["image_grid_thw"][0])
    return height // merged, width // merged


def _qwen(context: Context, token: int, arrays: Arrays) -> list[int]:
    height, width = _qwen_grid(context, arrays)
    return [token] * (height * width)


def _step(context: Context, token: int, arrays: Arrays) -> list[int]:
    """Return the windows row by row, then the whole image. Two convolutions after the encoder each halve its sides."""
    patch = context.vision.positive("patch_size", 14)
    tiles = arrays.get("pixel_values_local", arrays["pixel_values"])
    counts = [math.ceil(int(each.shape[-1]) // patch / 4) ** 2 for each in (tiles, arrays["pixel_values"])]
    window = [*context.encode("<patch_start>"), *[token] * counts[0], *context.encode("<patch_end>")]
    rows, columns = (int(each) for each in arrays["grids"][0])
    line = window * columns
    written = [*(line + context.encode("<patch_newline>")) * (rows - 1), *line] if rows else []
    return [*written, *context.encode("<im_start>"), *[token] * counts[1], *context.encode("<im_end>")]


def _ovis_2_5(context: Context, token: int, arrays: Arrays) -> list[int]:
    return [token, *_qwen(context, token, arrays), token]


def _hunyuan_grid(context: Context, arrays: Arrays) -> tuple[int, int]:
    rows, columns = _qwen_grid(context, arrays)
    return rows, columns + 1


def _hunyuan(context: Context, token: int, arrays: Arrays) -> list[int]:
    """Return the rows, each with a vector for its end, with one vector before the first row and one after the last."""
    return [*_hunyuan_rows(context, token, arrays), token, token]


def _hunyuan_rows(context: Context, token: int, arrays: Arrays) -> list[int]:
    return [token] * math.prod(_hunyuan_grid(context, arrays))


def _video_llama(context: Context, token: int, arrays: Arrays) -> list[int]:
    return [token] * (int(arrays["image_grid_thw"][0].prod()) // int(arrays["image_merge_sizes"][0]) ** 2)


def _gemma3(context: Context, token: int, arrays: Arrays) -> list[int]:
    """Return the whole image, then its pieces where the processor cuts any (pan and scan)."""
    config, lines = context.config, context.encode("\n\n")
    begin, end = (first_positive(config, keys) for keys in (_BEGIN, ("eoi_token_index", "eoi_token_id")))
    one = [*lines, begin, *[token] * config.positive("mm_tokens_per_image", 256), end, *lines]
    num_crops = int(arrays["num_crops"][0]) if "num_crops" in arrays else 0
    if not num_crops:
        return one
    crops = [each for _ in range(num_crops - 1) for each in (*one, *context.encode(" "))] + one
    behind = " and here are some crops to help you see better "
    return [*context.encode("Here is the original image "), *one, *context.encode(behind), *crops]


def _gemma3n(context: Context, token: int, arrays: Arrays) -> list[int]:
    lines, count = context.encode("\n\n"), context.config.positive("vision_soft_tokens_per_image", 256)
    begin, end = (context.config.positive(key) for key in ("boi_token_id", "eoi_token_id"))
    return [*lines, begin, *[token] * count, end, *lines]


def _gemma4(context: Context, token: int, arrays: Arrays) -> list[int]:
    begin, end = (context.config.positive(key) for key in ("boi_token_id", "eoi_token_id"))
    key, side = "position_embedding_size", 1 + int(arrays["image_position_ids"].max())
    if side > (most := context.vision.positive(key, 10_240)):
        raise InvalidRequest(
            f"an image of the prompt has {side:,} patches on a side, more than {key}, which is {most:,}; "
            "cut it, or pad it to a shape nearer to a square",
            field="multi_modal_data",
        )
    return [begin, *[token] * int(arrays["num_soft_tokens_per_image"][0]), end]


def _is_seen_whole(config: Section) -> bool:
    """Return whether tokens of an image attend to each other: in small models of Gemma 4 they are causal, as text
    is."""
    text = config.section("text_config") or config
    return text.values.get("use_bidirectional_attention") == "vision"


def indicators(config: Section) -> list[int]:
    """Return Ovis' tokens that stand for vectors around those of tiles. Raises CheckpointError."""
    found = config.values.get("visual_indicator_token_ids") or [*range(151666, 151671)]
    if not isinstance(found, list) or len(found) != 5 or not all(type(each) is int and each >= 0 for each in found):
        raise config.error("visual_indicator_token_ids", "the ids of 5 tokens")
    return found


def _ovis(context: Context, token: int, arrays: Arrays) -> list[int]:
    """Return the whole image, then the tiles by rows and columns. The tokens around tiles stand for vectors, too."""
    vision, (rows, columns) = context.vision, (int(each) for each in arrays["grids"][0])
    side = vision.positive("image_size", 224) // vision.positive("patch_size", 14)
    tile = [token] * math.ceil(side / vision.positive("hidden_stride", 1)) ** 2
    begin, grid, between, line_end, end = indicators(context.config)
    row = [*[*tile, between] * (columns - 1), *tile, line_end]
    return [begin, *tile, grid, *(row * rows)[: -1 if rows * columns > 1 else 0], end]


def _minicpm(context: Context, token: int, arrays: Arrays) -> list[int]:
    """Return the number of an image, the whole image, and the rows of its slices."""
    merged = 4 if context.settings.get("downsample_mode") == "4x" else 16
    counts = [int(height * width) // merged for height, width in arrays["target_sizes"]]
    if (num_queries := context.config.optional_positive("query_num")) is not None:
        counts = [num_queries] * len(counts)
    whole, *slices = ([token] * count for count in counts)
    number = f"<image_id>{context.place}</image_id>" if context.settings.get("use_image_id", True) else ""
    written = [*context.encode(f"{number}<image>"), *whole, *context.encode("</image>")]
    columns = max(1, int(arrays["grids"][0][1]))
    for place, each in enumerate(slices):
        line_end = "\n" if place and place % columns == 0 else ""
        written += [*context.encode(f"{line_end}<slice>"), *each, *context.encode("</slice>")]
    return written


def _sam_side(context: Context, pixels: NDArray[Any]) -> int:
    """Return how many rows of vectors a piece of [pieces, 3, side, side] has: a quarter of its rows of patches."""
    sam = context.vision.section("sam_config") or context.vision
    return math.ceil(int(pixels.shape[-1]) // sam.positive("patch_size", 16) / 4)


def _got_ocr(context: Context, token: int, arrays: Arrays) -> list[int]:
    pixels = arrays["pixel_values"]
    return [token] * (len(pixels) * _sam_side(context, pixels) ** 2)


def _deepseek_ocr(context: Context, token: int, arrays: Arrays) -> list[int]:
    """Return the rows of all tiles together and of the whole image, with a vector for each row's end and the
    image's."""
    side = _sam_side(context, arrays["pixel_values"])
    count = 1 + side * (side + 1)
    if "pixel_values_local" in arrays:
        side, (columns, rows) = _sam_side(context, arrays["pixel_values_local"]), arrays["patches_grid"][0]
        count += side * int(rows) * (side * int(columns) + 1)
    return [token] * count


def _deepseek_ocr2(context: Context, token: int, arrays: Arrays) -> list[int]:
    """Return tiles, the whole image, and a vector for its end. A small piece becomes 144 vectors, a large one 256."""
    pieces = [arrays[name] for name in ("pixel_values", "pixel_values_local") if name in arrays]
    counts = [len(each) * (256 if _sam_side(context, each) ** 2 > 144 else 144) for each in pieces]
    return [token] * (1 + sum(counts))


def _deepseek_vl2(context: Context, token: int, arrays: Arrays) -> list[int]:
    """Return the rows of the whole image, one vector, and the rows of all tiles; each row has a vector for its end."""
    side = math.ceil(int(arrays["pixel_values"].shape[-1]) // context.vision.positive("patch_size", 16) / 2)
    rows, columns = (int(each) * side for each in arrays["grids"][0])
    return [token] * (side * (side + 1) + 1 + rows * (columns + 1))


def _kimi(context: Context, token: int, arrays: Arrays) -> list[int]:
    sides = context.vision.values.get("merge_kernel_size") or (2, 2)
    return [token] * (int(arrays["image_grid_thw"][0].prod()) // math.prod(sides))


def _muse(context: Context, token: int, arrays: Arrays) -> list[int]:
    merged = context.vision.positive("merge_size", 2) ** 2
    vectors = [token] * (int(arrays["image_grid_thw"][0].prod()) // merged)
    return [*context.encode("<|image_start|>"), *vectors, *context.encode("<|image_end|>")]


def _eagle(context: Context, token: int, arrays: Arrays) -> list[int]:
    return [*context.encode(f"<image {context.place + 1}>"), *internvl_prompt(context, token, arrays)]


def _nemotron(context: Context, token: int, arrays: Arrays) -> list[int]:
    merged = round(1 / context.config.positive_float("downsample_ratio", 0.5)) ** 2
    vectors = [token] * (int(arrays["image_grid_hw"][0].prod()) // merged)
    return [*context.encode("<img>"), *vectors, *context.encode("</img>")]


def _minimax(context: Context, token: int, arrays: Arrays) -> list[int]:
    begin, end = (context.encode(f"]<]{each} of image[>[") for each in ("start", "end"))
    return [*begin, *_qwen(context, token, arrays), *end]


def _phi3v(context: Context, token: int, arrays: Arrays) -> list[int]:
    """Return the rows of all tiles and of the whole image, each with a vector for its end, and one between both."""
    vision = context.vision
    side = vision.positive("image_size", 336)
    tile = side // vision.positive("patch_size", 14) // 2
    rows, columns = (int(each) // side * tile for each in arrays["image_sizes"][0])
    return [token] * (rows * (columns + 1) + 1 + tile * (tile + 1))


def _phi4(context: Context, token: int, arrays: Arrays) -> list[int]:
    """Return the rows of all tiles, without padding, and of the whole image, each with a vector for its end, and one
    between both."""
    mask = arrays["image_attention_mask"][0][:, ::2, ::2]
    tile = len(mask[0])
    rows, columns = (int(each) // context.vision.positive("image_size", 448) for each in arrays["image_sizes"][0])
    grid = mask[1:].reshape(rows, columns, tile, tile)
    height, width = int(grid[:, 0, :, 0].sum()), int(grid[0, :, 0].sum())
    return [token] * (height * (width + 1) + 1 + tile * (tile + 1))


def _num_cross_vectors(context: Context, arrays: Arrays) -> int:
    vision = context.vision
    side = vision.positive("image_size", 448) // vision.positive("patch_size", 14)
    return int(arrays["aspect_ratio_mask"].sum()) * (side * side + 1)


_NEMOTRON: Final = ("image_token_id", "img_context_token_id")
_PLACEHOLDER: Final = ("media_placeholder_token_id", "image_token_id")
_BEGIN: Final = ("boi_token_index", "boi_token_id")
_LOCAL: Final = ("pixel_values", "pixel_values_local", "num_local_patches")
_SIZED: Final = ("pixel_values", "image_sizes")

_PATCHES: Final = ("pixel_values", "image_grid_thw")
_QWEN: Final = ImageWriter(_qwen, _PATCHES, grid=_qwen_grid)
_QWEN_IN_LINE: Final = _QWEN._replace(grid=None)
"""As `_QWEN`, but vectors have the positions of their tokens."""
_ALONE: Final = ImageWriter(lambda context, token, arrays: [token], is_alone=True)
"""Writes one token for an image; the token itself is not read."""
_MINICPM: Final = ImageWriter(_minicpm, ("pixel_values", "target_sizes"))

IMAGE_WRITERS: Final[Mapping[str, ImageWriter]] = {
    "aria": ImageWriter(_aria, ("pixel_values", "pixel_mask")),
    "aya": ImageWriter(aya_prompt, word="<image>"),
    "blip2": ImageWriter(_blip2, arranged=blip2_prompt, most=1, token_word="<image>"),
    "clip": _ALONE._replace(token_word="<|endoftext|>"),
    "cohere2": ImageWriter(cohere2_prompt),
    "deepseek_ocr": ImageWriter(_deepseek_ocr, (*_LOCAL, "patches_grid")),
    "deepseek_ocr2": ImageWriter(_deepseek_ocr2, _LOCAL),
    "deepseek_vl2": ImageWriter(_deepseek_vl2, ("pixel_values", "grids"), token_word="<image>", most_cut=2),
    "eagle": ImageWriter(_eagle, word="<image-{}>"),
    "ernie": _QWEN._replace(arranged=ernie_prompt, num_before=1),
    "gemma3": ImageWriter(_gemma3, marker=_BEGIN, is_whole=lambda config: True, joins_lines=True),
    "gemma3n": ImageWriter(_gemma3n, others=lambda config: [config.positive("eoi_token_id")], joins_lines=True),
    "gemma4": ImageWriter(_gemma4, ("pixel_values", "image_position_ids"), is_whole=_is_seen_whole),
    "got_ocr": ImageWriter(_got_ocr),
    "hunyuan": ImageWriter(_hunyuan, _PATCHES, grid=_hunyuan_grid, is_apart=True),
    "hyv4": ImageWriter(_hunyuan_rows, _PATCHES, grid=_hunyuan_grid),
    "intern": ImageWriter(internvl_prompt, word="<image>", token_word="<IMG_CONTEXT>"),
    "internvl": ImageWriter(internvl_prompt),
    "janus": ImageWriter(_janus),
    "kimi": ImageWriter(_kimi, _PATCHES),
    "lfm2": ImageWriter(lfm2_prompt, ("pixel_values", "pixel_attention_mask", "spatial_shapes")),
    "lighton": ImageWriter(_lighton, _SIZED),
    "llama4": ImageWriter(llama4_prompt, word="<|image|>"),
    "llava": ImageWriter(_llava, _SIZED),
    "minicpm": _MINICPM._replace(word="(<image>./</image>)", token_word="<unk>"),
    "minicpm4_6": _MINICPM,
    "minimax": ImageWriter(_minimax, _PATCHES),
    "mllama": ImageWriter(
        lambda context, token, arrays: [token],
        ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask"),
        num_vectors=_num_cross_vectors,
    ),
    "molmo2": ImageWriter(
        molmo2_tokens,
        ("pixel_values", "image_token_pooling", "image_grids"),
        marker=("image_patch_id",),
        token=("image_patch_id",),
        arranged=molmo2_prompt,
        word="<|image|>",
        are_marks_seen=True,
        most=1,
    ),
    "muse": ImageWriter(_muse, _PATCHES),
    "nemotron": ImageWriter(_nemotron, ("pixel_values", "image_grid_hw"), marker=_NEMOTRON, token=_NEMOTRON),
    "nvlm": ImageWriter(nvlm_prompt, word="<image>", token_word="<|vision_pad|>"),
    "opencua": _QWEN_IN_LINE._replace(marker=_PLACEHOLDER, token=_PLACEHOLDER),
    "ovis2": ImageWriter(_ovis, ("pixel_values", "grids"), word="<image>", others=indicators),
    "ovis2_5": ImageWriter(_ovis_2_5, _PATCHES, word="<image>", token_word="<|image_pad|>"),
    "pages": ImageWriter(internvl_prompt, word="<image>"),
    "paligemma": ImageWriter(_llava, arranged=paligemma_prompt),
    "patches": ImageWriter(_llava),
    "phi3v": ImageWriter(_phi3v, _SIZED, word="<|image_{}|>"),
    "phi4": ImageWriter(_phi4, ("image_pixel_values", "image_attention_mask", "image_sizes")),
    "pinned": ImageWriter(pinned_prompt, _SIZED),
    "pixtral": ImageWriter(_pixtral, _SIZED),
    "qwen": _QWEN,
    "qwen_in_line": _QWEN_IN_LINE,
    "siglip": _ALONE._replace(token_word="<unk>"),
    "smolvlm": ImageWriter(smolvlm_prompt, ("pixel_values", "pixel_attention_mask"), {"return_row_col_info": True}),
    "step": ImageWriter(_step, _LOCAL),
    "tiles": ImageWriter(internvl_prompt, marker=_NEMOTRON, token=_NEMOTRON, token_word="<image>"),
    "video_llama": ImageWriter(_video_llama, (*_PATCHES, "image_merge_sizes")),
}
"""The writers by `images` of a `MediaFamily`."""
