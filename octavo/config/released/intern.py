"""Configs of InternVL and of NVLM-D in the layout of their releases, whose code stands beside their weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.config.section import Section

_MOST_TILES: Final = 12


def intern_layout(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the config of a release as transformers' InternVLConfig has it, with the settings of images.

    Raises CheckpointError, and UnsupportedModel for values that no release has.
    """
    if "llm_config" not in config:
        return config
    section = Section(config, where)
    text, vision = (section.section(name) for name in ("llm_config", "vision_config"))
    if text is None or vision is None:
        raise section.error("vision_config" if text else "llm_config", "the sizes of that part of the model")
    section.expect("ps_version", "v2", default="v2")
    section.expect("select_layer", -1, default=-1)
    section.expect("use_msac", False, default=False)  # H2OVL Mississippi 2B cuts single images in two ways
    section.expect("use_thumbnail", True, default=True)
    ratio = section.expect("downsample_ratio", 0.5, default=0.5)
    size, patch = (
        section.positive("force_image_size", vision.positive("image_size", 448)),
        vision.positive("patch_size", 14),
    )
    if size % patch or size // patch % 2:
        raise section.error("force_image_size", f"a multiple of two patches, {2 * patch} pixels")
    renamed = {"qkv_bias": "attention_bias", "qk_normalization": "use_qk_norm"}
    names = ("hidden_act", "hidden_size", "intermediate_size", "layer_norm_eps", "norm_type", "num_attention_heads")
    own = {name: vision.values[name] for name in (*names, "num_hidden_layers") if vision.values.get(name) is not None}
    own |= {ours: vision.bool(name, False) for name, ours in renamed.items()}
    return {
        **{name: value for name, value in config.items() if name not in ("auto_map", "llm_config", "text_config")},
        "downsample_ratio": ratio,
        "image_seq_length": (size // patch // 2) ** 2,
        "model_type": "internvl",
        "text_config": text.values,
        "vision_config": {**own, "image_size": size, "model_type": "internvl_vision", "patch_size": patch},
    }


def nvlm_layout(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the config of NVLM-D as `intern_layout` does; its text model is called Llama, and is Qwen2. Raises as
    `intern_layout`."""
    made = intern_layout(config, where)
    if made is config:
        return config
    text = Section(made["text_config"], where)
    text.expect("architectures", ["Qwen2ForCausalLM"], default=["Qwen2ForCausalLM"])
    text.expect("mlp_bias", False, default=False)
    return {**made, "text_config": {**text.values, "model_type": "qwen2"}}


def intern_settings(config: Section) -> Mapping[str, Any]:
    """Return the settings of the image processor that the code of the releases has. Raises CheckpointError."""
    vision = config.section("vision_config") or config
    side = vision.positive("image_size", 448)
    return {
        "image_processor_type": "GotOcr2ImageProcessor",
        "crop_to_patches": config.bool("dynamic_image_size", True),
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
        "max_patches": config.positive("max_dynamic_patch", _MOST_TILES),
        "min_patches": config.positive("min_dynamic_patch", 1),
        "size": {"height": side, "width": side},
    }
