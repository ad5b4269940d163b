"""What a config.json would say of the metadata of llama.cpp's architectures with mixtures behind dense layers.

A function returns what an architecture's config has beyond the common keys `base`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.gguf import configs
from octavo.gguf.metadata import Metadata
from octavo.gguf.reader import Array


def afmoe(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    """All but every fourth layer have a window, where the file does not say which."""
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


def mellum(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    return {**configs.qwen3moe(meta, base), **_kinds(meta), **_rotations(meta, base)}


def layer_kinds(meta: Metadata) -> list[str]:
    """Return the kind of each layer. Raises CheckpointError."""
    value = meta.values.get("attention.sliding_window_pattern")
    pattern = value.values()[: meta.num_layers] if isinstance(value, Array) else []
    if len(pattern) < meta.num_layers:
        raise meta.error("attention.sliding_window_pattern", "whether each layer has a window")
    return ["sliding_attention" if each in (True, 1) else "full_attention" for each in pattern]


def mlp_kinds(meta: Metadata) -> list[str]:
    """Return for each layer whether it is a mixture: those that have a router are."""
    layers = range(meta.num_layers)
    return ["sparse" if f"blk.{each}.ffn_gate_inp.weight" in meta.types else "dense" for each in layers]


def _kinds(meta: Metadata) -> dict[str, Any]:
    return {"layer_types": layer_kinds(meta), "mlp_layer_types": mlp_kinds(meta)}


def _rotations(meta: Metadata, base: dict[str, Any]) -> dict[str, Any]:
    """Return the rotations of both kinds of layers: those with a window are not stretched."""
    local = meta.positive_float("rope.freq_base_swa", base["rope_theta"])
    full = {"rope_type": "default", **(base["rope_scaling"] or {}), "rope_theta": base["rope_theta"]}
    return {
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }
