"""What a config.json would say of the metadata of llama.cpp's architectures with mixtures behind dense layers.

A function returns what an architecture's config has beyond the common keys `base`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.gguf import configs
from octavo.gguf.metadata import Metadata


def afmoe(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    """Return AFMoE's keys: all but every fourth layer have a window, where the file does not say which."""
    own = configs.glm4moe(meta, base)
    has_kinds = "attention.sliding_window_pattern" in meta.values
    return {
        **own,
        "num_shared_experts": own["n_shared_experts"],
        "num_dense_layers": own["first_k_dense_replace"],
        "route_norm": own["norm_topk_prob"],
        "route_scale": own["routed_scaling_factor"],
        "mup_enabled": True,
        "layer_types": layer_kinds(meta) if has_kinds else None,
    }


def exaone_moe(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    own = configs.glm4moe(meta, base)
    return {**own, **_kinds(meta), "num_shared_experts": own["n_shared_experts"]}


def hy_v3(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    own = configs.mixture(meta, base)
    shared = meta.optional_int("expert_shared_feed_forward_length") or 0
    return {
        **own,
        "mlp_layer_types": mlp_kinds(meta),
        "num_shared_experts": shared // own["moe_intermediate_size"],
        "router_scaling_factor": meta.positive_float("expert_weights_scale", 1.0),
    }


def mistral4(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    own, kinds = configs.deepseek(meta, base), mlp_kinds(meta)
    scaling = own["rope_scaling"]
    if scaling is not None and "attention.temperature_scale" in meta.values:
        scaling = {**scaling, "llama_4_scaling_beta": meta.float("attention.temperature_scale")}
    head = {"head_dim": own["qk_rope_head_dim"] + own["qk_nope_head_dim"]}
    return {**own, **head, "rope_scaling": scaling, "first_k_dense_replace": kinds.count("dense")}


def glm_dsa(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    """Return GLM's keys: layers without an indexer attend to the tokens that an earlier layer has chosen."""
    has_indexer = [f"blk.{layer}.indexer.attn_k.weight" in meta.types for layer in range(meta.num_layers)]
    indexer = "attention.indexer"
    return {
        **configs.deepseek(meta, base),
        "model_type": "glm_moe_dsa",
        "index_n_heads": meta.positive(f"{indexer}.head_count"),
        "index_head_dim": meta.positive(f"{indexer}.key_length"),
        "index_topk": meta.positive(f"{indexer}.top_k"),
        "indexer_types": ["full" if each else "shared" for each in has_indexer] if has_indexer[0] else None,
    }


def cohere2moe(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    """Return Cohere2's keys: dense layers before the mixtures may have another width."""
    own, gating = configs.mixture(meta, base), meta.optional_int("expert_gating_func") or 2
    if gating not in (1, 2):
        raise meta.error("expert_gating_func", "1 (softmax) or 2 (sigmoid)")
    return {
        **own,
        **configs.cohere(meta, base),
        **_kinds(meta),
        "rms_norm_eps": meta.values.get("attention.layer_norm_rms_epsilon"),
        "intermediate_size": own["moe_intermediate_size"],
        "prefix_dense_intermediate_size": base["intermediate_size"],
        "num_shared_experts": meta.optional_int("expert_shared_count") or 0,
        "expert_selection_fn": ("softmax", "sigmoid")[gating - 1],
        "norm_topk_prob": meta.bool("expert_weights_norm", False),
    }


def granite_swa(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    pattern, count = meta.array("attention.rope_pattern"), meta.num_layers
    turns = [True] * count if pattern is None else pattern[:count]
    if len(turns) < count:
        raise meta.error("attention.rope_pattern", "whether each layer rotates")
    common = {
        "layer_types": layer_kinds(meta),
        "layer_rope_theta": [base["rope_theta"] if each else 0 for each in turns],
    }
    if meta.optional_int("expert_count"):
        return {**configs.granite_moe(meta, base), **common, "architectures": ["GraniteMoeSWAForCausalLM"]}
    return {**configs.granite(meta, base), **common}


def dbrx(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    own, limit = configs.mixture(meta, base), meta.values.get("attention.clamp_kqv") or None
    counts = {"moe_num_experts": own["num_experts"], "moe_top_k": own["num_experts_per_tok"]}
    return {**own, **counts, "intermediate_size": own["moe_intermediate_size"], "clip_qkv": limit}


def mellum(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    return {**configs.qwen3moe(meta, base), **_kinds(meta), **_rotations(meta, base)}


def mimo2(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    own, kinds = configs.glm4moe(meta, base), _kinds(meta)
    heads = _heads_by_kind(meta, "attention.head_count_kv", kinds["layer_types"])
    value = meta.positive("attention.value_length", base["head_dim"])
    has_factor = "attention.value_scale" in meta.values
    return {
        **own,
        **kinds,
        **_rotations(meta, base, own["partial_rotary_factor"], own["partial_rotary_factor"]),
        "num_key_value_heads": heads["full_attention"],
        "v_head_dim": value,
        "swa_num_attention_heads": base["num_attention_heads"],
        "swa_num_key_value_heads": heads["sliding_attention"],
        "swa_head_dim": base["head_dim"],
        "swa_v_head_dim": value,
        "attention_value_scale": meta.float("attention.value_scale") if has_factor else None,
    }


def step35(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    """Return Step 3.5's keys: layers that see all tokens rotate half of each head, and use as many divisors only."""
    own, kinds = configs.mixture(meta, base), _kinds(meta)
    heads = _heads_by_kind(meta, "attention.head_count", kinds["layer_types"])
    turning = _rotations(meta, base, 0.5, 1.0)
    full = turning["rope_parameters"]["full_attention"]
    limits, shared_limits = map(meta.array, ("swiglu_clamp_exp", "swiglu_clamp_shexp"))
    full |= {name: full[name][: base["head_dim"] // 4] for name in ("short_factor", "long_factor") if name in full}
    return {
        **own,
        **kinds,
        **turning,
        "num_attention_heads": heads["full_attention"],
        "num_sliding_attention_heads": heads["sliding_attention"],
        "share_expert_dim": meta.positive("expert_shared_feed_forward_length"),
        "moe_router_scaling_factor": meta.positive_float("expert_weights_scale", 1.0),
        "norm_expert_weight": meta.bool("expert_weights_norm", True),
        "swiglu_limits": limits and limits[: meta.num_layers],
        "swiglu_limits_shared": shared_limits and shared_limits[: meta.num_layers],
    }


def _heads_by_kind(meta: Metadata, name: str, kinds: list[str]) -> dict[str, int]:
    """Return the heads of layers that see all tokens, and of those with a window. Raises CheckpointError."""
    heads = meta.array(name)
    heads = [meta.values.get(name)] * len(kinds) if heads is None else heads
    found = dict(zip(kinds, heads, strict=False))
    if len(heads) < len(kinds) or any(not isinstance(each, int) or each < 1 for each in found.values()):
        raise meta.error(name, f"the heads of each of {len(kinds)} layers")
    return {kind: found.get(kind, heads[0]) for kind in ("full_attention", "sliding_attention")}


def layer_kinds(meta: Metadata) -> list[str]:
    """Return the kind of each layer. Raises CheckpointError."""
    pattern = meta.array("attention.sliding_window_pattern") or []
    if len(pattern) < meta.num_layers:
        raise meta.error("attention.sliding_window_pattern", "whether each layer has a window")
    kinds = ["sliding_attention" if each in (True, 1) else "full_attention" for each in pattern]
    return kinds[: meta.num_layers]


def mlp_kinds(meta: Metadata) -> list[str]:
    """Return for each layer whether it is a mixture: those that have a router are."""
    layers = range(meta.num_layers)
    return ["sparse" if f"blk.{each}.ffn_gate_inp.weight" in meta.types else "dense" for each in layers]


def _kinds(meta: Metadata) -> dict[str, Any]:
    return {"layer_types": layer_kinds(meta), "mlp_layer_types": mlp_kinds(meta)}


def _rotations(meta: Metadata, base: dict[str, Any], share: float = 1.0, windowed_share: float = 1.0) -> dict[str, Any]:
    """Return the rotations of both kinds of layers, given the rotated shares of a head. Those with a window are not
    scaled.
    """
    local = meta.positive_float("rope.freq_base_swa", base["rope_theta"])
    own = {"rope_theta": base["rope_theta"], "partial_rotary_factor": share}
    windowed = {"rope_type": "default", "rope_theta": local, "partial_rotary_factor": windowed_share}
    return {
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", **(base["rope_scaling"] or {}), **own},
            "sliding_attention": windowed,
        },
    }
