"""ERNIE 4.5 VL as Baidu released it, whose code stands beside its weights, in the layout of transformers' class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.config.section import Section

ERNIE_VL: Final = "Ernie4_5_VLMoeForConditionalGeneration"
_TEXT: Final = (
    *("hidden_size", "intermediate_size", "max_position_embeddings", "moe_intermediate_size", "moe_k", "moe_norm_min"),
    *("num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "use_bias", "vocab_size"),
)
_VISION: Final = ("depth", "hidden_size", "hidden_act", "num_heads", "in_channels", "patch_size", "spatial_merge_size")
_KINDS: Final = 2
"""Length of the lists that have a value for text and one for images."""


def ernie_layout(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the config of a release as transformers' class has it. Raises CheckpointError, and UnsupportedModel for
    values that no release has."""
    if "im_patch_id" not in config:
        return config
    section = Section(config, where)
    section.expect("rope_3d", True, default=True)
    section.expect("moe_use_aux_free", True, default=True)
    experts = _pair(section, "moe_num_experts")
    if experts[0] != experts[1]:
        raise section.error("moe_num_experts", "as many experts for text as for images")
    layers, every = range(section.positive("num_hidden_layers")), section.positive("moe_layer_interval", 1)
    first, last = min(_pair(section, "moe_layer_start_index")), max(_pair(section, "moe_layer_end_index"))
    kinds = ["sparse" if first <= each <= last and (each + 1) % every == 0 else "dense" for each in layers]
    text = {name: config[name] for name in _TEXT if config.get(name) is not None}
    text |= {"moe_num_experts": experts[0], "mlp_layer_types": kinds, "model_type": "ernie4_5_vl_moe_text"}
    text["moe_num_shared_experts"] = section.count("moe_num_shared_experts", 0)
    num_time = section.positive("freq_allocation", 20)
    width = section.positive("hidden_size") // section.positive("num_attention_heads")
    pairs = section.positive("head_dim", width) // 2
    sides = (pairs - num_time) // 2
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": section.positive_float("rope_theta", 500_000.0),
        "mrope_section": [sides, sides, num_time],
    }
    own: dict[str, Any] = {"text_config": text, "vision_config": _vision(section), "model_type": "ernie4_5_vl_moe"}
    ends = {name: value for name, value in config.items() if name.endswith("_token_id")}
    own |= {"image_token_id": section.positive("im_patch_id"), "architectures": [ERNIE_VL], **ends}
    around = ("bos_token_id", "dtype", "eos_token_id", "quantization_config", "tie_word_embeddings", "torch_dtype")
    return {**{name: config[name] for name in around if name in config}, **own}


def _vision(section: Section) -> dict[str, Any]:
    vision = section.part("vision_config")
    own = {name: vision.values[name] for name in _VISION if vision.values.get(name) is not None}
    width = vision.positive("hidden_size", 1280)
    return {
        **own,
        "intermediate_size": round(width * vision.positive_float("mlp_ratio", 4.0)),
        "model_type": "ernie4_5_vl_moe_vision",
        "spatial_merge_size": section.positive("spatial_conv_size", 2),
        "temporal_merge_size": section.positive("temporal_conv_size", 2),
    }


def _pair(section: Section, name: str) -> list[int]:
    """Return a number for text and one for images. Raises CheckpointError."""
    found: list[int] = section.listed(name, _KINDS, lambda each: type(each) is int and each >= 0, "two integers")
    return found


def ernie_settings(settings: Section) -> Mapping[str, Any]:
    """Return the settings of the image processor by transformers' names. Raises CheckpointError."""
    if "min_pixels" not in settings.values:
        return settings.values
    own = {name: value for name, value in settings.values.items() if name not in ("min_pixels", "max_pixels")}
    least, most = settings.positive("min_pixels", 56 * 56), settings.positive("max_pixels", 28 * 28 * 6177)
    return {
        **own,
        "image_processor_type": "Ernie4_5_VLMoeImageProcessor",
        "size": {"shortest_edge": least, "longest_edge": most},
    }
