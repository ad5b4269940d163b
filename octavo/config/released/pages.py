"""NVIDIA's models with SigLIP by tiles: those of pages, where Llama, whose tokens see both sides, makes vectors or
scores; and Eagle 2.5."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from octavo.config.section import Section


def pages_layout(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the config of a release whose parts are called as in transformers' classes.

    Raises CheckpointError, and UnsupportedModel for values that no release has.
    """
    if "image_seq_length" in config:
        return config
    section = Section(config, where)
    text, vision = (section.section(name) for name in ("llm_config", "vision_config"))
    if text is None or vision is None:
        raise section.error("vision_config" if text else "llm_config", "the sizes of that part of the model")
    section.expect_all(ps_version="v2", select_layer=-1, downsample_ratio=0.5, keep_aspect_ratio=False)
    section.refuse("pre_feature_reduction", because="vectors of images are not made fewer before they are joined")
    side, patch = _sides(section, vision, (512, 16))
    pooling = section.expect("pooling", "avg", "cls", "last", default=text.values.get("pooling") or "avg")
    return {
        **{name: value for name, value in config.items() if name not in ("auto_map", "llm_config")},
        "image_seq_length": (side // patch // 2) ** 2,
        "image_token_id": section.positive("img_context_token_id", 128_258),
        "is_causal": False,
        "text_config": {**text.values, "pooling": pooling},
        "vision_config": {**vision.values, "image_size": side, "patch_size": patch},
    }


def pages_settings(config: Section, read: Callable[[str], Section]) -> Mapping[str, Any]:
    """Return the settings of the image processor that the code of the releases has.

    read: returns what a file of the checkpoint has. Raises CheckpointError or UnsupportedModel.
    """
    processor = read("processor_config.json")
    processor.expect_all(use_thumbnail=True, norm_type="siglip")
    side = config.part("vision_config").positive("image_size")
    if processor.positive("image_size", side) != side:
        raise processor.error("image_size", f"image_size of vision_config, which is {side}")
    is_cut = processor.bool("dynamic_image_size", config.bool("dynamic_image_size", True))
    least, most = (
        processor.positive(f"{name}_input_tiles", config.positive(f"{name}_dynamic_patch", 1))
        for name in ("min", "max")
    )
    return {
        "image_processor_type": "LlamaNemotronVLImageProcessor",
        "max_patches": most if is_cut else 1,
        "min_patches": least if is_cut else 1,
        "size": {"height": side, "width": side},
    }


def eagle_layout(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the config of Eagle 2.5 with the sizes that follow from it. Raises as `pages_layout`."""
    if "image_seq_length" in config or "vision_config" not in config:
        return config
    section = Section(config, where)
    section.expect_all(select_layer=-1, downsample_ratio=0.5, use_pixel_shuffle=True, pad2square=False)
    vision = section.part("vision_config")
    side, patch = _sides(section, vision, (224, 16))
    return {
        **{name: value for name, value in config.items() if name != "auto_map"},
        "image_seq_length": (side // patch // 2) ** 2,
        "vision_config": {**vision.values, "image_size": side, "patch_size": patch},
    }


def eagle_settings(config: Section, read: Callable[[str], Section]) -> Mapping[str, Any] | None:
    """Return the settings of the image processor that the code of Eagle 2.5 has; None where no file has any. read,
    errors: as of `pages_settings`."""
    processor = read("processor_config.json")
    found = processor.section("image_processor") or read("preprocessor_config.json")
    if "image_processor_type" not in found.values:
        return None
    count, side = config.positive("image_seq_length"), config.part("vision_config").positive("image_size")
    processor.expect("tokens_per_tile", count, default=count)
    found.expect_all(use_thumbnail=True, pad_during_tiling=False)
    if any(found.part("size").positive(name, 448) != side for name in ("height", "width")):
        raise found.error("size", f"the image_size of vision_config, {side} x {side}")
    least, most = found.positive("min_dynamic_tiles", 1), found.positive("max_dynamic_tiles", 12)
    own = {"max_patches": most, "min_patches": least, "image_processor_type": "LlamaNemotronVLImageProcessor"}
    return {**found.values, **own, "size": {"height": side, "width": side}}


def _sides(section: Section, vision: Section, default: tuple[int, int]) -> tuple[int, int]:
    """Return the sides of tiles and of patches. Raises CheckpointError."""
    vision.expect("model_type", "siglip_vision_model")
    side, patch = vision.positive("image_size", default[0]), vision.positive("patch_size", default[1])
    if side % (2 * patch):
        raise vision.error("image_size", f"a multiple of two patches, {2 * patch} pixels")
    if section.values.get("force_image_size") is not None and section.positive("force_image_size") != side:
        raise section.error("force_image_size", f"image_size of vision_config, which is {side}")
    return side, patch
