"""Configs of Mistral's own layout (params.json beside consolidated.safetensors and tekken.json).

Its models mostly have config.json and weights in the layout of Hugging Face, too, and are read from those.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from octavo.config.section import Section
from octavo.errors import UnsupportedModel

PARAMS: Final = "params.json"
NATIVE: Final = "has_native_names"
"""The key that says so, for what reads the weights."""
CONSOLIDATED: Final = "consolidated.safetensors"
_SIZES: Final = {
    "dim": "hidden_size",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "vocab_size": "vocab_size",
}
_TEXT: Final = frozenset(
    {*_SIZES, "activation", "max_position_embeddings", "max_seq_len", "model_type", "norm_eps", "rope_theta"}
) | {"sliding_window", "tied_embeddings", "use_biases", "vision_encoder"}
_OF_ENCODER: Final = (
    *("hidden_size", "image_size", "intermediate_size", "num_attention_heads", "num_channels", "num_hidden_layers"),
    "patch_size",
)
_VISION: Final = frozenset(_OF_ENCODER) | {
    *("adapter_bias", "add_pre_mm_projector_layer_norm", "image_break_token_id", "image_end_token_id"),
    *("image_token_id", "max_image_size", "mm_projector_id", "rope_theta", "spatial_merge_size"),
}
_CONTEXT: Final = 128_000
"""Positions of models whose params.json names none."""


def is_native(path: Path) -> bool:
    """Return whether a folder has this layout alone."""
    return not (path / "config.json").is_file() and (path / PARAMS).is_file()


def native_layout(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a config as transformers' classes for the same models have it.

    Raises CheckpointError, and UnsupportedModel for keys that are none of a dense model of text and images.
    """
    section = Section(values, where)
    _check_keys(values, _TEXT, where, "")
    section.expect("activation", "silu", default="silu")
    section.expect("use_biases", False, default=False)
    longest = section.optional_positive("max_position_embeddings") or section.positive("max_seq_len", _CONTEXT)
    text: dict[str, Any] = {
        **{own: section.positive(name) for name, own in _SIZES.items()},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "max_position_embeddings": longest,
        "model_type": "mistral",
        NATIVE: True,
        "rms_norm_eps": section.positive_float("norm_eps", 1e-5),
        "rope_theta": section.positive_float("rope_theta", 10_000.0),
        "sliding_window": section.optional_positive("sliding_window"),
        "tie_word_embeddings": section.bool("tied_embeddings", False),
    }
    vision = section.section("vision_encoder")
    if vision is None:
        return {**text, "architectures": ["MistralForCausalLM"]}
    _check_keys(vision.values, _VISION, where, "vision_encoder.")
    merged = vision.positive("spatial_merge_size", 1)
    has_norm = vision.bool("add_pre_mm_projector_layer_norm", False)
    vision.expect("mm_projector_id", "", "patch_merge", default="")
    if (merged > 1) != has_norm or has_norm != (vision.str("mm_projector_id", "") == "patch_merge"):
        raise vision.error("mm_projector_id", "patch_merge, a spatial_merge_size above 1 and a norm, or none of these")
    rope = {"rope_type": "axial", "rope_theta": vision.positive_float("rope_theta", 10_000.0)}
    return {
        "architectures": [f"{'Mistral3' if has_norm else 'Llava'}ForConditionalGeneration"],
        "model_type": "mistral3" if has_norm else "llava",
        "image_token_index": vision.positive("image_token_id"),
        "multimodal_projector_bias": vision.bool("adapter_bias", True),
        NATIVE: True,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": merged,
        "text_config": text,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "vision_config": {
            **{name: vision.positive(name) for name in _OF_ENCODER},
            "head_dim": vision.positive("hidden_size") // vision.positive("num_attention_heads"),
            "hidden_act": "silu",
            "model_type": "pixtral",
            "rope_parameters": rope,
        },
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    }


def native_images(values: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """Return the settings of the image processor; None for a model of text. Raises CheckpointError."""
    vision = Section(values, where).section("vision_encoder")
    if vision is None:
        return None
    size = vision.positive("patch_size") * vision.positive("spatial_merge_size", 1)
    longest = vision.positive("max_image_size", vision.positive("image_size"))
    return {
        "image_processor_type": "PixtralImageProcessor",
        "patch_size": {"height": size, "width": size},
        "size": {"longest_edge": longest},
    }


def _check_keys(values: Mapping[str, Any], known: frozenset[str], where: str, prefix: str) -> None:
    others = sorted(name for name, value in values.items() if name not in known and value not in (None, False, {}))
    if others:
        raise UnsupportedModel(
            f"{where}: {prefix}{others[0]} is set, which is not read in Mistral's own layout; use the weights in the "
            "layout of Hugging Face (config.json and model*.safetensors)"
        )
