"""NVIDIA's models of pages: Llama whose tokens see both sides, with SigLIP, makes vectors or scores."""

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
    vision.expect("model_type", "siglip_vision_model")
    side, patch = vision.positive("image_size", 512), vision.positive("patch_size", 16)
    if side % (2 * patch):
        raise vision.error("image_size", f"a multiple of two patches, {2 * patch} pixels")
    if section.positive("force_image_size", side) != side:
        raise section.error("force_image_size", f"image_size of vision_config, which is {side}")
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
