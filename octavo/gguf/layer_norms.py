"""What a config.json would say of the metadata of llama.cpp's architectures with LayerNorms and plain MLPs.

A function returns what an architecture's config has beyond the common keys `base`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.gguf import configs
from octavo.gguf.metadata import Metadata


def gpt2(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    """Files of GPT-2 have weights as StarCoder has them, [outputs, inputs]."""
    return {
        "n_layer": base["num_hidden_layers"],
        "n_embd": base["hidden_size"],
        "n_head": base["num_attention_heads"],
        "n_inner": _width(meta, base),
        "n_positions": base["max_position_embeddings"],
        "layer_norm_epsilon": base["layer_norm_eps"],
        "multi_query": meta.architecture == "starcoder",
        "activation_function": "gelu_new" if meta.architecture == "gpt2" else "gelu_pytorch_tanh",
    }


def gpt_neox(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    return {
        **configs.partial(meta, base),
        "intermediate_size": _width(meta, base),
        "attention_bias": meta.has("attn_qkv.bias"),
        "use_parallel_residual": meta.bool("use_parallel_residual", True),
    }


def bloom(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    return {"layer_norm_epsilon": base["layer_norm_eps"]}


def mpt(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    slope = meta.float("attention.max_alibi_bias", 8.0)
    attention = {"alibi": slope > 0, "alibi_bias_max": slope, **configs.olmo(meta, base)}
    return {"no_bias": True, "layer_norm_epsilon": base["layer_norm_eps"], "attn_config": attention}


def phi(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    return {**configs.partial(meta, base), "intermediate_size": _width(meta, base), "hidden_act": "gelu_new"}


def _width(meta: Metadata, base: dict[str, Any]) -> int:
    """Return the width of MLPs, which files state as four times that of the model whatever it is."""
    up = meta.types.get("blk.0.ffn_up.weight")
    return int(base["intermediate_size"] if up is None else up.shape[0])
