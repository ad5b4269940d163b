"""Configs of Kimi-VL, Kimi K2.5 and later models in the layout of their releases, whose code stands beside weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.config.section import Section

KIMI: Final = "Kimi_K25ForConditionalGeneration"
"""transformers' name of the architecture."""
_OF_VISION: Final = {
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_time": "pos_emb_time",
    "init_pos_emb_width": "pos_emb_width",
    "merge_kernel_size": "merge_kernel_size",
    "patch_size": "patch_size",
    "vt_hidden_size": "hidden_size",
    "vt_intermediate_size": "intermediate_size",
    "vt_num_attention_heads": "num_attention_heads",
    "vt_num_hidden_layers": "num_hidden_layers",
}
"""Names of K2.5; Kimi-VL has them without `vt_`."""
_OF_IMAGES: Final = {
    "image_mean": "image_mean",
    "image_std": "image_std",
    "in_patch_limit": "max_patches",
    "merge_kernel_size": "merge_size",
    "patch_size": "patch_size",
}


def kimi_layout(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the config of a release as transformers' class has it. Raises UnsupportedModel for values that no release
    has."""
    if config["architectures"][0] == KIMI:
        return config
    section = Section(config, where)
    vision = section.part("vision_config")
    vision.expect_all(merge_type="sd2_tpool", mm_projector_type="patchmerger", pos_emb_type="divided_fixed")
    stated = {**{f"vt_{name}": value for name, value in vision.values.items()}, **vision.values}
    own = {name: stated[old] for old, name in _OF_VISION.items() if stated.get(old) is not None}
    width = Section(own, where, "vision_config.").positive("hidden_size", 1152)
    return {
        **{name: value for name, value in config.items() if name != "auto_map"},
        "architectures": [KIMI],
        "image_token_id": section.positive("media_placeholder_token_id", 163605),
        "model_type": "kimi_k25",
        "projection_hidden_size": vision.positive("mm_hidden_size", width),
        "projection_layer_norm_eps": vision.positive_float("projector_ln_eps", 1e-5),
        "vision_config": {**own, "model_type": "kimi_k25_vision"},
    }


def kimi_settings(settings: Section) -> Mapping[str, Any]:
    """Return the settings of the image processor by transformers' names. Raises CheckpointError or UnsupportedModel."""
    if (released := settings.section("media_proc_cfg")) is not None:
        return _k25_settings(released)
    return _vl_settings(settings) if "in_token_limit" in settings.values else settings.values


def _k25_settings(settings: Section) -> Mapping[str, Any]:
    settings.expect("fixed_output_tokens", None, default=None)
    side = settings.positive("patch_limit_on_one_side", 512)
    own = {name: settings.values[old] for old, name in _OF_IMAGES.items() if settings.values.get(old) is not None}
    return {
        "image_processor_type": "Kimi_K25ImageProcessor",
        "size": {"max_height": side, "max_width": side},
        **own,
    }


def _vl_settings(settings: Section) -> Mapping[str, Any]:
    """Return the settings of Kimi-VL's image processor, whose images may have any number of patches on a side."""
    settings.expect("pad_input", True, default=False)
    settings.expect("merge_kernel_size", [2, 2])
    if absent := [name for name in ("image_mean", "image_std") if settings.values.get(name) is None]:
        raise settings.error(absent[0], "three numbers")
    own = {name: settings.values[name] for name in ("image_mean", "image_std")}
    return {
        "image_processor_type": "KimiVLImageProcessor",
        "max_patches": settings.positive("in_token_limit", 4096),
        "patch_size": settings.positive("patch_size", 14),
        **own,
    }
