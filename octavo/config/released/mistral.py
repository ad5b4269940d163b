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
"""The key that marks a config of this layout for the readers of weights."""
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
) | {"quantization", "sliding_window", "tied_embeddings", "use_biases", "vision_encoder"}
_LATENTS: Final = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_OF_LATENTS: Final = _TEXT | {*_LATENTS, "llama_4_scaling", "moe", "yarn"}
_EXPERTS: Final = {
    "expert_hidden_dim": "moe_intermediate_size",
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
_GROUPS: Final = {"num_expert_groups": "n_group", "num_expert_groups_per_tok": "topk_group"}
_MOE: Final = frozenset({*_EXPERTS, *_GROUPS, "first_k_dense_replace", "routed_scale", "route_every_n"}) | {
    # how a training placed experts
    *("expert_model_parallel", "expert_parallel"),
    *("renorm_strategy", "use_load_balancing_bias"),
}
_YARN: Final = frozenset({"alpha", "apply_scale", "beta", "factor", "original_max_position_embeddings"})
_QUANTIZATION: Final = frozenset({"qformat_weight", "qscheme_act"})
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

    Raises CheckpointError, and UnsupportedModel for keys that are none of a dense model or one with latents.
    """
    section = Section(values, where)
    has_latents = values.get("kv_lora_rank") is not None
    _check_keys(section, _OF_LATENTS if has_latents else _TEXT)
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
    if has_latents:
        text |= _latents(section)
    quantized = _quantization(section)
    vision = section.section("vision_encoder")
    if vision is None:
        return {**text, **quantized, "architectures": [f"Mistral{'4' if has_latents else ''}ForCausalLM"]}
    _check_keys(vision, _VISION, "vision_encoder.")
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
        **quantized,
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


def _latents(section: Section) -> dict[str, Any]:
    """Return what Mistral Large 3 has beside the keys of a dense model, as Mistral Small 4 has it in transformers."""
    moe = section.part("moe")
    _check_keys(moe, _MOE, "moe.")
    moe.expect("route_every_n", 1)
    moe.expect("renorm_strategy", "WEIGHTS")
    moe.expect("use_load_balancing_bias", False)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": section.positive_float("rope_theta", 10_000.0)}
    yarn, growth = section.section("yarn"), section.section("llama_4_scaling")
    if yarn is not None:
        _check_keys(yarn, _YARN, "yarn.")
        rope |= {
            "rope_type": "yarn",
            "factor": yarn.positive_float("factor"),
            "original_max_position_embeddings": yarn.positive("original_max_position_embeddings"),
            "beta_fast": yarn.positive_float("beta", 32.0),
            "beta_slow": yarn.positive_float("alpha", 1.0),
            **({"mscale": 1.0, "mscale_all_dim": 1.0} if yarn.bool("apply_scale", True) else {"attention_factor": 1.0}),
        }
    if growth is not None:
        original = growth.positive("original_max_position_embeddings")
        growth.expect("original_max_position_embeddings", rope.setdefault("original_max_position_embeddings", original))
        rope["llama_4_scaling_beta"] = growth.float("beta")
    first = moe.values.get("first_k_dense_replace")
    return {
        **{name: section.positive(name) for name in _LATENTS},
        **{own: moe.positive(name) for name, own in _EXPERTS.items()},
        **{own: moe.positive(name, 1) for name, own in _GROUPS.items()},
        "first_k_dense_replace": 0 if first is None else moe.int("first_k_dense_replace"),
        "model_type": "mistral4",
        "norm_topk_prob": True,
        "num_key_value_heads": section.positive("n_heads"),
        "rope_parameters": rope,
        "routed_scaling_factor": moe.positive_float("routed_scale", 1.0),
    }


def _quantization(section: Section) -> dict[str, Any]:
    """Return the `quantization_config` of weights in FP8; nothing for others."""
    stated = section.section("quantization")
    if stated is None or not stated.values:
        return {}
    _check_keys(stated, _QUANTIZATION, "quantization.")
    stated.expect("qformat_weight", "fp8_e4m3", default=None)
    return {"quantization_config": {"quant_method": "fp8"}}


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


def _check_keys(section: Section, known: frozenset[str], prefix: str = "") -> None:
    stated = (name for name, value in section.values.items() if value not in (None, False, {}))
    if others := sorted({*stated} - known):
        raise UnsupportedModel(
            f"{section.where}: {prefix}{others[0]} is set, which is not read in Mistral's own layout; use the weights "
            "in the layout of Hugging Face (config.json and model*.safetensors)"
        )
