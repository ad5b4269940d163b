"""Which checkpoints have images read, and the settings of their image processors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeGuard

from octavo.config.checkpoint import Checkpoint, read_json_object, read_section
from octavo.config.encoder_sizes import check_encoder
from octavo.config.released_ernie import ERNIE_VL, ernie_settings
from octavo.config.released_intern import INTERN, QIANFAN, intern_settings
from octavo.config.released_kimi import KIMI, kimi_settings, kimi_vl_settings
from octavo.config.released_minicpm import MINICPM_V
from octavo.config.released_minimax import MINIMAX_M3, minimax_settings
from octavo.config.released_nemotron import NEMOTRON_OMNI, NEMOTRON_V2, nemotron_settings, squares_settings
from octavo.config.released_ovis import OVIS, ovis_patches, ovis_settings
from octavo.config.released_pages import NEMOTRON_PAGES, pages_settings
from octavo.config.released_phi3 import PHI3V
from octavo.config.released_phi4 import PHI4, phi4_settings
from octavo.config.released_phi4 import RELEASED as PHI4_RELEASED
from octavo.config.released_step import STEP, STEP_IMAGES, step_settings
from octavo.config.section import Section

DUAL: Final = ("CLIPModel", "SiglipModel")
"""Architectures that make a vector of a text or of an image."""
READ_IMAGES: Final = frozenset(
    f"{name}ForConditionalGeneration"
    for name in (
        *("Aria", "AyaVision", "Cohere2Vision", "DeepseekOcr2", "DeepseekVL", "Ernie4_5_VLMoe", "Exaone4_5_", "Gemma3"),
        *("Gemma3n", "Gemma4", "Gemma4Unified"),
        *("Glm46V", "Glm4v", "Glm4vMoe", "GlmOcr", "GotOcr2", "Granite4Vision", "Idefics3", "InternVL", "Lfm2Vl"),
        *("LightOnOcr", "Llama4", "Llava", "LlavaNext", "LlavaOnevision", "MiniCPMV4_6", "Mistral3"),
        *("MistralLarge4", "Ovis2"),
        *("PaddleOCRVL", "PaliGemma", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe"),
        *("SmolVLM", "Qwen2_5Omni", "Qwen3OmniMoe", "VideoLlama3", "VipLlava"),
        *(
            "HYV4VL",
            "HunYuanVL",
            "HyperCLOVAXVisionV2",
            "Janus",
            "Kimi_K25",
            "Lfm3Vl",
            "LlavaNextVideo",
            "Mllama",
            "MuseGlimmer",
        ),
        *("Glm5Next", "HYV4VL", "Keye", "KeyeVL1_5", "MiniMaxM3Sparse", "OpenCUA"),
    )
) | {
    *(*DUAL, *INTERN, "DeepseekOCRForCausalLM", "DotsOCRForCausalLM"),
    *(*MINICPM_V, *NEMOTRON_PAGES, *OVIS, *STEP, PHI3V, PHI4, PHI4_RELEASED, NEMOTRON_V2, *NEMOTRON_OMNI),
}
"""Architectures whose images are read, with transformers."""
GEMMA_UNIFIED: Final = "Gemma4UnifiedForConditionalGeneration"
ARIA: Final = "AriaForConditionalGeneration"
_QUERIES: Final[Mapping[Any, Any]] = {1225: 128, 4900: 256}
"""How many vectors Aria makes of so many patches, unless its config says so."""
WHOLE_PROMPTS: Final = frozenset({"PaliGemmaForConditionalGeneration"})
"""Architectures in which all tokens of a prompt attend to each other."""

MOST_CROSS_IMAGES: Final = 4
"""Most images of one prompt where layers read them through caches, which have room for so many."""

_RENAMED: Final = {
    (GEMMA_UNIFIED, "Gemma4UnifiedImageProcessor"): "Gemma4ImageProcessor",
    **{
        (f"{name}ForConditionalGeneration", f"{processor}ImageProcessor"): "PaddleOCRVLImageProcessor"
        for name in ("Keye", "KeyeVL1_5", "PaddleOCRVL")
        for processor in ("KeyeVL", "KeyeVL1_5", "Siglip")
    },
}
"""Image processors by architecture and the name of a class beside the weights, as transformers calls them."""
_UNSTATED: Final = {
    "DeepseekOCRForCausalLM": "DeepseekOcrImageProcessor",
    "DeepseekOcr2ForConditionalGeneration": "DeepseekOcr2ImageProcessor",
    **dict.fromkeys(STEP, STEP_IMAGES),
}
"""Image processors by architecture where releases have no settings of one."""
_FIXED: Final = {
    "AyaVisionForConditionalGeneration": 384,
    "DeepseekVLForConditionalGeneration": 224,
    "Gemma3ForConditionalGeneration": 224,
    "GotOcr2ForConditionalGeneration": 1024,
    "Idefics3ForConditionalGeneration": 224,
    "InternVLForConditionalGeneration": 448,
    "JanusForConditionalGeneration": 384,
    "Llama4ForConditionalGeneration": 448,
    "MllamaForConditionalGeneration": 448,
    "Ovis2ForConditionalGeneration": 224,
    DUAL[1]: 224,
    "PaliGemmaForConditionalGeneration": 224,
    "SmolVLMForConditionalGeneration": 224,
    **dict.fromkeys((PHI4, PHI4_RELEASED, QIANFAN), 448),
}
"""Architectures whose encoders read images of one size, and that size where their configs leave it out."""
_CUT: Final = frozenset(f"{name}ForConditionalGeneration" for name in ("Granite4Vision", "LlavaNext", "VipLlava")) | {
    DUAL[0]
}
"""Architectures whose images are cut into pieces of the size that their encoders read."""
_TILED: Final = frozenset({"Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"})
"""Architectures whose images are cut into tiles of that size."""
_PROCESSOR: Final = "processor_config.json"
_FILES: Final = ("preprocessor_config.json", _PROCESSOR)
_MOST_PIXELS: Final = 1 << 25
"""To which small images are scaled up."""
_LONGEST_EDGE: Final = 1 << 13
_PATCHES: Final = {
    "patch_size": "patch_size",
    "merge_size": "spatial_merge_size",
    "temporal_patch_size": "temporal_patch_size",
}
"""Settings of processors, and what encoders call the same."""
_SIZES: Final = (
    *("size", "crop_size", "max_image_size", "num_crops", "min_pixels", "max_pixels", "min_patches", "max_patches"),
    *("max_slice_nums", "scale_resolution", "min_size", "min_tiles", "max_tiles", "tile_size", "encoder_patch_size"),
    *("min_image_tokens", "max_image_tokens"),
)
_ORDERED: Final = (
    ("size.shortest_edge", "size.longest_edge"),
    *((f"min_{each}", f"max_{each}") for each in ("pixels", "patches", "tiles", "image_tokens")),
)
"""Sizes of which the first is not above the second."""
_NEEDED: Final = (*_PATCHES, "size", "resample", "rescale_factor", "image_mean", "image_std", "do_resize")
"""Settings that a null leaves out, as a key that is not there: no image is read with it."""
_NUM_CHANNELS: Final = 3
_OF_CHANNELS: Final = (
    ("image_mean", -math.inf, math.inf, "finite numbers"),
    ("image_std", 0.0, math.inf, "numbers above 0"),
    ("background_color", -1, 256, "numbers from 0 to 255"),
)
_FILTERS: Final = range(6)
_MOST_TILES: Final = 1 << 8
"""Processors try every grid of as many."""


_LAYOUTS: Final[tuple[tuple[tuple[str, ...], str | None, Callable[[Section], Mapping[str, Any]]], ...]] = (
    ((ERNIE_VL,), "min_pixels", ernie_settings),
    ((PHI4, PHI4_RELEASED), "dynamic_hd", phi4_settings),
    ((MINIMAX_M3,), None, lambda found: minimax_settings(found.values)),
    (OVIS, None, ovis_settings),
    (STEP, None, step_settings),
    (NEMOTRON_OMNI, None, lambda found: nemotron_settings(found.values)),
)
"""Other layouts of settings: the architectures, a key by which it is recognised (None: any), and what translates it."""


def image_settings(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """Return the settings of the image processor of a checkpoint that has images read; None for one without.

    Raises CheckpointError for a damaged file, for settings with which images become NaN or take all memory, and for
    sizes that no encoder can have.
    """
    if checkpoint.architecture not in READ_IMAGES:
        return None
    for part in ("vision_config", "qformer_config", "projector_config"):
        check_encoder(checkpoint.stored.section(part))
    if checkpoint.image_processor is not None:
        return _checked(checkpoint.image_processor, str(checkpoint.mmproj or checkpoint.where))
    if checkpoint.architecture == NEMOTRON_V2:
        squares = squares_settings(checkpoint.stored, read_section(checkpoint.path / _FILES[0], may_lack=True))
        return None if squares is None else _checked(squares, checkpoint.where)
    if checkpoint.architecture in NEMOTRON_PAGES:
        processor = read_section(checkpoint.path / _PROCESSOR, may_lack=True)
        return _checked(pages_settings(checkpoint.stored, processor), checkpoint.where)
    for file in (checkpoint.path / each for each in _FILES):
        found = _stored_settings(checkpoint, file)
        if "image_processor_type" in found.values:
            name = found.str("image_processor_type")
            own: dict[str, Any] = {"image_processor_type": _RENAMED.get((checkpoint.architecture, name), name)}
            if name.startswith("MiniCPMV"):  # the encoder's
                own["downsample_mode"] = checkpoint.stored.str("downsample_mode", "16x")
            if checkpoint.architecture in OVIS:
                own |= ovis_patches(checkpoint.stored.part("vision_config"))
            _check_patches(found, checkpoint.stored)
            if checkpoint.architecture == "MllamaForConditionalGeneration":
                _check_tiles(found, checkpoint.stored)
            if checkpoint.architecture == ARIA:
                num_queries(checkpoint.stored, found.positive("max_image_size", 980))
            own |= _merged_patch(checkpoint) | _joined_patch(found, checkpoint)
            return _checked({**found.values, **own}, found.where, _fixed_side(checkpoint))
    if checkpoint.architecture in INTERN - {QIANFAN}:
        return _checked(intern_settings(checkpoint.stored), checkpoint.where)
    unstated = _UNSTATED.get(checkpoint.architecture)
    return None if unstated is None else {"image_processor_type": unstated}


def _stored_settings(checkpoint: Checkpoint, file: Path) -> Section:
    """Return what a file says of the image processor, in today's words; nothing where it is not there."""
    values = read_json_object(file) if file.is_file() else {}
    if (released := Section(values, str(file)).section("media_proc_cfg")) is not None:
        values = dict(kimi_settings(released))
    elif checkpoint.architecture == KIMI and "in_token_limit" in values:
        values = dict(kimi_vl_settings(Section(values, str(file))))
    found = values.get("image_processor", values)
    if not isinstance(found, dict):
        return Section({}, str(file))
    for architectures, name, translate in _LAYOUTS:
        if checkpoint.architecture in architectures and found and (name is None or name in found):
            found = translate(Section(found, str(file)))
    return Section({name: each for name, each in found.items() if each is not None or name not in _NEEDED}, str(file))


def _check_patches(settings: Section, config: Section) -> None:
    """Raise CheckpointError for patches and pieces of images that are none, or that the encoder does not read."""
    vision = config.section("vision_config") or config
    for name, of_encoder in _PATCHES.items():
        if settings.values.get(name) is None:
            continue
        if isinstance(settings.values[name], Mapping):
            sides = settings.section(name) or settings
            for side in ("height", "width"):
                if sides.positive(side) > _LONGEST_EDGE:
                    raise sides.error(side, f"1 to {_LONGEST_EDGE:,}")
            continue
        size, expected = settings.positive(name), vision.values.get(of_encoder)
        if type(expected) is int and size != expected:
            raise settings.error(name, f"{of_encoder} of the encoder in config.json, which is {expected}")
        if size > _LONGEST_EDGE:
            raise settings.error(name, f"1 to {_LONGEST_EDGE:,}")
    grids = [
        sorted(_pinpoints(each)) for each in (settings, config) if each.values.get("image_grid_pinpoints") is not None
    ]
    if grids[1:] and grids[0] != grids[1]:
        raise config.error("image_grid_pinpoints", f"those of {settings.where}")


def _check_tiles(settings: Section, config: Section) -> None:
    """Raise CheckpointError for tiles, and for shapes of images in tiles, that Llama 3.2's encoder does not have."""
    vision = config.part("vision_config")
    most, shapes = settings.positive("max_image_tiles", 4), vision.values.get("supported_aspect_ratios")
    if most > _MOST_TILES or most != vision.positive("max_num_tiles", 4):
        raise settings.error("max_image_tiles", f"max_num_tiles of vision_config, at most {_MOST_TILES}")
    known = [[width, height] for width in range(1, most + 1) for height in range(1, most // width + 1)]
    if shapes is not None and shapes != known:
        raise vision.error("supported_aspect_ratios", f"{len(known)} pairs, those of up to {most} tiles in order")


def num_queries(config: Section, side: int) -> int:
    """Return how many vectors Aria makes of an image with a side of so many pixels. Raises CheckpointError."""
    key = "projector_patch_to_query_dict"
    num_patches = (side // config.part("vision_config").positive("patch_size", 14)) ** 2
    stated = _QUERIES if config.values.get(key) is None else config.part(key).values
    found = {str(name): each for name, each in stated.items()}.get(str(num_patches))
    if type(found) is not int or found < 1:
        raise config.error(key, f"a number of queries for {num_patches:,} patches")
    return found


def _pinpoints(section: Section) -> list[Any]:
    """Return the heights and widths to which images are scaled before they are cut. Raises CheckpointError."""
    found = section.values["image_grid_pinpoints"]
    found = found if isinstance(found, list) else []
    sides = [side for pair in found if isinstance(pair, list) and len(pair) == 2 for side in pair]
    if not found or len(sides) != 2 * len(found) or not all(type(each) is int and each > 0 for each in sides):
        raise section.error("image_grid_pinpoints", "pairs of a height and a width")
    return found


def _fixed_side(checkpoint: Checkpoint) -> tuple[str, int] | None:
    """Return the setting with the side of images and this side, where an encoder reads those of one size; None of
    others. Raises CheckpointError."""
    vision = checkpoint.stored.part("vision_config")
    is_clip = vision.values.get("model_type") == "clip_vision_model"
    if checkpoint.architecture in _CUT or (is_clip and checkpoint.architecture == "LlavaForConditionalGeneration"):
        side = vision.optional_positive("image_size")
        return None if side is None else ("crop_size", side)
    default, sides = _FIXED.get(checkpoint.architecture), vision.values.get("image_size")
    if default is None or (isinstance(sides, list) and len({*sides}) != 1):  # of InternVL's, some are no squares
        return None
    side = sides[0] if isinstance(sides, list) else vision.positive("image_size", default)
    return "max_image_size" if checkpoint.architecture in _TILED else "size", side


def _joined_patch(settings: Section, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the settings with which Gemma 4's processor makes a patch of the pixels that one of its vectors stands
    for, where nothing joins vectors behind an encoder. Raises CheckpointError."""
    if checkpoint.architecture != GEMMA_UNIFIED:
        return {}
    vision = checkpoint.stored.part("vision_config")
    joined = vision.positive("pooling_kernel_size", 3)
    if settings.positive("pooling_kernel_size", 3) != joined:
        raise settings.error("pooling_kernel_size", f"that of vision_config, which is {joined}")
    if (most := settings.positive("max_soft_tokens", 280)) > vision.positive("mm_posemb_size", 1120):
        raise vision.error("mm_posemb_size", f"at least max_soft_tokens, which is {most}")
    return {"patch_size": joined * vision.positive("patch_size", 16), "pooling_kernel_size": 1}


def _merged_patch(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the size that Pixtral's processor gives its image processor: sizes of images are multiples of that of
    patches that are merged. Raises CheckpointError."""
    section = read_section(checkpoint.path / _PROCESSOR, may_lack=True)
    if section.values.get("processor_class") != "PixtralProcessor":
        return {}
    size = section.positive("patch_size", 16) * section.positive("spatial_merge_size", 1)
    return {"patch_size": {"height": size, "width": size}}


def _checked(settings: Mapping[str, Any], where: str, fixed: tuple[str, int] | None = None) -> Mapping[str, Any]:
    """Return the settings of an image processor. Raises CheckpointError, which names one that no image survives.

    fixed: the setting with the side of images, and this side, where the encoder reads those of one size.
    """
    name, side = fixed or ("size", 0)
    if fixed is not None and settings.get(name) is None:
        own = ("longest_edge",) if name == "max_image_size" else ("height", "width")
        settings = {**settings, name: dict.fromkeys(own, side)}
    sizes = _flat(settings)
    section = Section({**settings, **sizes}, where)
    ways = (name, *(f"{name}.{each}" for each in ("height", "width", "longest_edge")))
    if fixed is not None and any(sizes.get(each, side) != side for each in ways):
        raise section.error(name, f"the image_size of vision_config, {side} x {side}")
    _check_steps(section)
    _check_sizes(section, sizes, str(settings["image_processor_type"]))
    return settings


def _check_sizes(section: Section, sizes: Mapping[str, Any], processor: str) -> None:
    """Raise CheckpointError for sizes that are none, that no image survives, or that contradict each other."""
    counts_pixels = processor.startswith(("Ernie", "HYV4VL", "HunYuan", "Qwen", "Glm", "PaddleOCR", "VideoLlama"))
    counts_pixels &= not processor.startswith("Glm5Next")  # which counts vectors
    no_aims = ("size.longest_edge", "max_pixels") if counts_pixels else ()  # nothing is scaled up to them
    for name, value in sizes.items():
        most = _MOST_PIXELS if counts_pixels else _LONGEST_EDGE
        is_count = name.endswith(("_crops", "_patches", "_tiles", "_nums"))
        most = _MOST_TILES if is_count and not processor.startswith("Kimi") else most
        is_none = isinstance(value, str | bool | Mapping) or ("." in name and isinstance(value, list))
        if is_none or (is_count and type(value) not in (int, type(None))):
            raise section.error(name, "an integer" if is_count else "a number")
        if _is_number(value) and not (0 < value <= most or (value > most and name in no_aims)):
            raise section.error(name, f"1 to {most:,}")
    edges = [sizes.get(f"size.{each}") is None for each in ("shortest_edge", "longest_edge")]
    if counts_pixels and edges[0] != edges[1]:
        raise section.error("size", "shortest_edge and longest_edge")
    for lower, upper in _ORDERED:
        first, second = sizes.get(lower), sizes.get(upper)
        if _is_number(first) and _is_number(second) and first > second:
            raise section.error(lower, f"at most {upper}, which is {second:,}")


def _check_steps(section: Section) -> None:
    """Raise CheckpointError for factors and flags of the processor's steps with which it fails, or makes NaN."""
    for name, least, most, words in _OF_CHANNELS:
        value = section.values.get(name)
        numbers = value if isinstance(value, list) else [value] * _NUM_CHANNELS
        is_fit = len(numbers) == _NUM_CHANNELS and all(_is_number(each) and least < each < most for each in numbers)
        if value is not None and not is_fit:
            raise section.error(name, f"{_NUM_CHANNELS} {words}")
    section.positive_float("rescale_factor", 1.0)
    if (filter_id := section.optional_int("resample")) is not None and filter_id not in _FILTERS:
        raise section.error("resample", f"one of Pillow's filters, {_FILTERS.start} to {_FILTERS.stop - 1}")
    for name in section.values:
        if name.startswith("do_"):
            section.bool(name, False)


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes among settings, those in objects by both names with a dot between them."""
    found: dict[str, Any] = {}
    for name in _SIZES:
        value = settings.get(name)
        if isinstance(value, Mapping) and name.endswith("size"):
            found |= {f"{name}.{key}": each for key, each in value.items()}
        else:
            found[name] = value
    return found


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
