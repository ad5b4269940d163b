"""Ovis 2.5 and 2.6, whose code stands beside their weights: Qwen3 with an encoder of the kind of PaddleOCR-VL's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.config.section import Section

_PIXELS: Final = {"shortest_edge": 448 * 448, "longest_edge": 1792 * 1792}
"""The numbers of pixels between which the code of the releases scales images."""
_OF_ENCODER: Final = (
    *("hidden_act", "hidden_size", "image_size", "intermediate_size", "layer_norm_eps", "num_attention_heads"),
    *("num_channels", "num_hidden_layers", "patch_size"),
)


def ovis_layout(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the config of a release whose parts are called as in transformers' classes.

    Raises CheckpointError, and UnsupportedModel for values that no release has.
    """
    if "vision_config" in config:
        return config
    section = Section(config, where)
    text, vision = (section.section(name) for name in ("llm_config", "vit_config"))
    if text is None or vision is None:
        raise section.error("vit_config" if text else "llm_config", "the sizes of that part of the model")
    vision.expect_all(preserve_original_pe=True, temporal_patch_size=1, use_rope=True)
    vision.expect("fullatt_block_indexes", None, default=None)
    vision.expect("num_patches", -1, default=-1)
    section.positive("visual_vocab_size")
    return {
        **{name: value for name, value in config.items() if name not in ("auto_map", "llm_config", "vit_config")},
        "text_config": text.values,
        "vision_config": {
            **{name: vision.values[name] for name in _OF_ENCODER if vision.values.get(name) is not None},
            "model_type": "paddleocr_vl_vision",
            "spatial_merge_size": vision.positive("hidden_stride", 2),
        },
    }


def ovis_settings(settings: Section) -> Mapping[str, Any]:
    """Return the settings of an image processor that scales and cuts as the code of the releases does.

    Patches are those of the encoder, whatever size of images is stated.
    """
    kept = {name: value for name, value in settings.values.items() if name not in ("crop_size", "size")}
    return {**kept, "image_processor_type": "PaddleOCRVLImageProcessor", "size": dict(_PIXELS)}


def ovis_patches(settings: Section, config: Section) -> dict[str, int]:
    """Return the settings that follow from the encoder. Raises CheckpointError."""
    vision = config.part("vision_config")
    sizes = {"patch_size": vision.positive("patch_size", 16), "merge_size": vision.positive("spatial_merge_size", 2)}
    return {**sizes, "temporal_patch_size": 1}
