"""Checks settings of image processors against the encoder of a family, or derives them from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.config.section import Section

_QUERIES: Final[Mapping[Any, Any]] = {1225: 128, 4900: 256}
"""The number of Aria's vectors by the number of patches, unless its config states it."""
MOST_TILES: Final = 1 << 8
"""Most tiles of an image: processors try every grid with at most so many tiles."""


def aria_fit(settings: Section, config: Section) -> Mapping[str, Any]:
    """Return nothing. Raises CheckpointError for images of which Aria makes no known number of vectors."""
    num_queries(config, settings.positive("max_image_size", 980))
    return {}


def num_queries(config: Section, side: int) -> int:
    """Return how many vectors Aria makes of an image with a side of so many pixels. Raises CheckpointError."""
    key = "projector_patch_to_query_dict"
    num_patches = (side // config.part("vision_config").positive("patch_size", 14)) ** 2
    stated = _QUERIES if config.values.get(key) is None else config.part(key).values
    found = {str(name): each for name, each in stated.items()}.get(str(num_patches))
    if type(found) is not int or found < 1:
        raise config.error(key, f"a number of queries for {num_patches:,} patches")
    return found


def joined_patch(settings: Section, config: Section) -> Mapping[str, Any]:
    """Return the settings with which Gemma 4's processor makes a patch of the pixels that one of its vectors stands
    for, where nothing joins vectors behind an encoder. Raises CheckpointError."""
    vision = config.part("vision_config")
    joined = vision.positive("pooling_kernel_size", 3)
    if settings.positive("pooling_kernel_size", 3) != joined:
        raise settings.error("pooling_kernel_size", f"that of vision_config, which is {joined}")
    if (most := settings.positive("max_soft_tokens", 280)) > vision.positive("mm_posemb_size", 1120):
        raise vision.error("mm_posemb_size", f"at least max_soft_tokens, which is {most}")
    return {"patch_size": joined * vision.positive("patch_size", 16), "pooling_kernel_size": 1}


def minicpm_fit(settings: Section, config: Section) -> Mapping[str, Any]:
    """Return MiniCPM-V 4.6's setting of how vectors are reduced in number, as the encoder has it."""
    return {"downsample_mode": config.str("downsample_mode", "16x")}


def mllama_fit(settings: Section, config: Section) -> Mapping[str, Any]:
    """Return nothing. Raises CheckpointError for tiles, and for shapes of images in tiles, that Llama 3.2's encoder
    does not have."""
    vision = config.part("vision_config")
    most, shapes = settings.positive("max_image_tiles", 4), vision.values.get("supported_aspect_ratios")
    if most > MOST_TILES or most != vision.positive("max_num_tiles", 4):
        raise settings.error("max_image_tiles", f"max_num_tiles of vision_config, at most {MOST_TILES}")
    known = [[width, height] for width in range(1, most + 1) for height in range(1, most // width + 1)]
    if shapes is not None and shapes != known:
        raise vision.error("supported_aspect_ratios", f"{len(known)} pairs, those of up to {most} tiles in order")
    return {}
