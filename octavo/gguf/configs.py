"""What a config.json would say of the metadata of llama.cpp's architectures that attend in all layers.

A function returns what an architecture's config has beyond the common keys `base`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any, Final

from octavo.gguf.metadata import Metadata

ConfigOf = Callable[[Metadata, dict[str, Any]], Mapping[str, Any]]


def common(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    """Heads are turned as a whole. Raises CheckpointError for a file that states less or more."""
    if meta.optional_positive("rope.dimension_count") not in (None, base["head_dim"]):
        expected = f"{base['head_dim']}, the size of a head, which {meta.architecture} turns as a whole"
        raise meta.error("rope.dimension_count", expected)
    return {}


def turned_whole(make: ConfigOf) -> ConfigOf:
    """Return `make`, which refuses what `common` does."""
    return lambda meta, base: {**common(meta, base), **make(meta, base)}


def plus(make: ConfigOf, **own: Any) -> ConfigOf:
    """Return `make` with keys that are the same for all files."""
    return lambda meta, base: {**make(meta, base), **own}


def deci(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    """Layers without heads of keys have one product in the place of attention; those without any heads have nothing."""
    heads = meta.each("attention.head_count")
    if {*heads} - {0, base["num_attention_heads"]}:
        raise meta.error("attention.head_count", f"{base['num_attention_heads']} or 0 for each layer")
    kept = zip(heads, meta.each("attention.head_count_kv"), meta.each("feed_forward_length"), strict=True)
    blocks = [
        {
            "attention": {"no_op": not own, "replace_with_linear": not kv, "num_key_value_heads": kv or None},
            "ffn": {"no_op": not width, "intermediate_size": width or None},
        }
        for own, kv, width in kept
    ]
    return {**common(meta, base), "block_configs": blocks}


def partial(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    turned = meta.positive("rope.dimension_count", base["head_dim"])
    return {"partial_rotary_factor": turned / base["head_dim"]}


def chatglm(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    return {**partial(meta, base), "attention_bias": base["attention_bias"] or meta.has("attn_qkv.bias")}


def mixture(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    experts = meta.positive("expert_count")
    return {
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), experts),
        "num_experts_per_tok": meta.positive("expert_used_count"),
        "moe_intermediate_size": meta.positive("expert_feed_forward_length", base["intermediate_size"]),
    }


def qwen2moe(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    width = meta.positive("expert_shared_feed_forward_length", base["intermediate_size"])
    return {**mixture(meta, base), "norm_topk_prob": False, "shared_expert_intermediate_size": width}


qwen3moe = plus(mixture, norm_topk_prob=True)


def routing(meta: Metadata, *, is_normalized: bool) -> dict[str, Any]:
    """Return how experts are chosen behind the dense layers. is_normalized: where the file does not say."""
    return {
        "first_k_dense_replace": meta.optional_int("leading_dense_block_count") or 0,
        "routed_scaling_factor": meta.positive_float("expert_weights_scale", 1.0),
        "norm_topk_prob": meta.bool("expert_weights_norm", is_normalized),
        "n_group": meta.optional_int("expert_group_count") or 1,
        "topk_group": meta.optional_int("expert_group_used_count") or 1,
    }


def sections(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    """Positions in time, height and width turn pairs of their own."""
    value = meta.array("rope.dimension_sections")
    if value is None:
        raise meta.error("rope.dimension_sections", "pairs for each of three positions")
    model_type = "qwen2_vl_text" if meta.architecture == "qwen2vl" else "qwen3_vl_text"
    scaling = {"rope_type": "default", **(base["rope_scaling"] or {}), "mrope_section": value[:3]}
    return {"model_type": model_type, "rope_scaling": scaling}


def sections_moe(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    return {**qwen3moe(meta, base), **sections(meta, base)}


GEMMA: Final[Mapping[str, Any]] = dict.fromkeys(("hidden_activation", "hidden_act"), "gelu_pytorch_tanh")


def gemma2(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    # the largest of these models scale scores by an even share of the width
    is_largest = base["num_hidden_layers"] == (46 if meta.architecture == "gemma2" else 62)
    scalar = base["hidden_size"] // base["num_attention_heads"] if is_largest else base["head_dim"]
    own = {"model_type": "gemma2", "query_pre_attn_scalar": scalar, "sliding_window": base["sliding_window"] or 4096}
    return {
        **GEMMA,
        **own,
        "attn_logit_softcapping": meta.values.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": meta.values.get("final_logit_softcapping", 30.0),
    }


def gemma3(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    cap, local = meta.values.get("final_logit_softcapping"), meta.positive_float("rope.freq_base_swa", 10_000.0)
    own = {"model_type": "gemma3_text", "attn_logit_softcapping": None, "final_logit_softcapping": cap}
    return {**gemma2(meta, base), **own, "rope_local_base_freq": local}


def gemma3n(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    windows, cuts = map(meta.array, ("attention.sliding_window_pattern", "activation_sparsity_scale"))
    sizes = {name: next(iter(tensor.shape), None) for name, tensor in meta.types.items()}
    # the file has the number of standard deviations in the place of the share that lies below it
    shares = cuts and [round(NormalDist().cdf(each), 6) if isinstance(each, float) else each for each in cuts]
    return {
        **gemma3(meta, base),
        "model_type": "gemma3n_text",
        "final_logit_softcapping": meta.values.get("final_logit_softcapping", 30.0),
        "layer_types": windows and [("full_attention", "sliding_attention")[each is True] for each in windows],
        "num_kv_shared_layers": meta.optional_int("attention.shared_kv_layers"),
        "activation_sparsity_pattern": shares,
        "altup_num_inputs": meta.optional_int("altup.num_inputs"),
        "altup_active_idx": meta.optional_int("altup.active_idx"),
        "hidden_size_per_layer_input": meta.optional_int("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": sizes.get("per_layer_token_embd.weight"),
        "laurel_rank": sizes.get("blk.0.laurel_l.weight"),
    }


def phi3(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    return {
        **partial(meta, base),
        "original_max_position_embeddings": meta.values.get("rope.scaling.original_context_length"),
    }


def mistral3(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    scaling = base["rope_scaling"]
    if scaling is None:
        return {}
    share = meta.float("rope.scaling.yarn_log_multiplier", 1.0)
    scaling = {**scaling, "mscale": share, "mscale_all_dim": share}
    if "attention.temperature_scale" in meta.values:
        scaling["llama_4_scaling_beta"] = meta.float("attention.temperature_scale")
    return {"rope_scaling": scaling}


def granite(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    return {
        "attention_multiplier": meta.float("attention.scale", base["head_dim"] ** -0.5),
        "embedding_multiplier": meta.float("embedding_scale", 1.0),
        "residual_multiplier": meta.float("residual_scale", 1.0),
        "logits_scaling": meta.positive_float("logit_scale", 1.0),
    }


def granite_moe(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    shared = meta.optional_int("expert_shared_feed_forward_length") or None
    own = {**granite(meta, base), **mixture(meta, base)}
    return {**own, "shared_intermediate_size": shared}


def deepseek(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    rank, turned = meta.positive("attention.kv_lora_rank"), meta.positive("rope.dimension_count")
    key, value = (
        meta.optional_positive(f"attention.{each}_length_mla") or meta.positive(f"attention.{each}_length")
        for each in ("key", "value")
    )
    scaling, routed = base["rope_scaling"], routing(meta, is_normalized=False)
    if scaling is not None and "rope.scaling.yarn_log_multiplier" in meta.values:
        share = meta.float("rope.scaling.yarn_log_multiplier") * 10
        scaling = {**scaling, "mscale": share, "mscale_all_dim": share}
    own = {
        "kv_lora_rank": rank,
        "q_lora_rank": meta.optional_positive("attention.q_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": key - turned,
        "v_head_dim": value,
        "n_shared_experts": meta.optional_int("expert_shared_count") or None,
        **routed,
        "rope_scaling": scaling,
    }
    if meta.values.get("expert_gating_func", 1) != 2:
        own["topk_method"] = "group_limited_greedy" if routed["n_group"] > 1 else "greedy"
    return {**mixture(meta, base), **own}


def minimax(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    own = mixture(meta, base)
    return {**partial(meta, base), **own, "intermediate_size": own["moe_intermediate_size"]}


def hunyuan_moe(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    shared = meta.optional_int("expert_shared_count") or 1
    return {**mixture(meta, base), "moe_topk": meta.positive("expert_used_count"), "num_shared_expert": shared}


def gpt_oss(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    width = meta.positive("expert_feed_forward_length", base["intermediate_size"])
    scaling = base["rope_scaling"] and {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, **base["rope_scaling"]}
    return {**mixture(meta, base), "model_type": "gpt_oss", "intermediate_size": width, "rope_scaling": scaling}


def stablelm(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    own = {"use_qkv_bias": base["attention_bias"], "qk_layernorm": meta.has("attn_q_norm.weight")}
    return {**partial(meta, base), **own, "use_parallel_residual": meta.bool("use_parallel_residual", False)}


def starcoder2(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    return {"use_bias": base["attention_bias"], "hidden_act": "gelu_pytorch_tanh", "sliding_window": None}


def cohere(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    return {"logit_scale": meta.float("logit_scale", 0.0625), "use_qk_norm": meta.has("attn_q_norm.weight")}


def glm4moe(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    own = {"use_qk_norm": meta.has("attn_q_norm.weight"), "n_shared_experts": meta.optional_int("expert_shared_count")}
    return {
        **partial(meta, base),
        **mixture(meta, base),
        **own,
        **routing(meta, is_normalized=True),
    }


def deepseek_moe(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    return {**glm4moe(meta, base), "norm_topk_prob": meta.bool("expert_weights_norm", False)}


def ling(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    return {**glm4moe(meta, base), "num_shared_experts": meta.optional_int("expert_shared_count")}


def minicpm(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    if "embedding_scale" in meta.values:
        return granite(meta, base)
    # what files of the first converter leave out
    factors = {"embedding_multiplier": 12.0, "logits_scaling": base["hidden_size"] / 256}
    return {**granite(meta, base), **factors, "residual_multiplier": 1.4 / base["num_hidden_layers"] ** 0.5}


def minicpm3(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    """Factors are not in files: all releases have the same."""
    turned = meta.positive("rope.dimension_count")
    return {
        "kv_lora_rank": meta.positive("attention.kv_lora_rank"),
        "q_lora_rank": meta.optional_positive("attention.q_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": meta.positive("attention.key_length") - turned,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    }


def olmo(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    return {"clip_qkv": meta.values.get("attention.clamp_kqv") or None}


def phimoe(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    return {**mixture(meta, base), **phi3(meta, base), "lm_head_bias": "output.bias" in meta.types}


def ernie(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    return {"use_bias": base["attention_bias"]}


def gemma4(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    names = "attention.sliding_window_pattern", "attention.head_count_kv", "feed_forward_length"
    pattern, kv, widths = map(meta.array, names)
    if pattern is None or len(pattern) < meta.num_layers or (kv and len(kv) != len(pattern)):
        raise meta.error("attention.sliding_window_pattern", "whether each layer has a window")
    windowed = [each is True for each in pattern[: meta.num_layers]]
    of_kind = dict(zip(windowed, kv or [], strict=False))
    full = [layer for layer, is_windowed in enumerate(windowed) if not is_windowed]
    turning = meta.file.floats("rope_freqs.weight") or [1.0]
    theta = meta.positive_float("rope.freq_base_swa", 10_000.0)
    shared, table = meta.optional_int("attention.shared_kv_layers") or 0, meta.types.get("per_layer_token_embd.weight")
    own = {
        "layer_types": [("full_attention", "sliding_attention")[each] for each in windowed],
        "head_dim": meta.positive("attention.key_length_swa"),
        "global_head_dim": base["head_dim"],
        "num_key_value_heads": of_kind.get(True, base["num_key_value_heads"]),
        "num_global_key_value_heads": of_kind.get(False),
        "attention_k_eq_v": any(
            f"blk.{layer}.attn_v.weight" not in meta.types for layer in full if layer < meta.num_layers - shared
        ),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": len(set(widths or ())) > 1,
        "hidden_size_per_layer_input": meta.optional_int("embedding_length_per_layer_input") or 0,
        "vocab_size_per_layer_input": table.shape[0] if table is not None else None,
        "final_logit_softcapping": meta.values.get("final_logit_softcapping"),
        "rope_scaling": None,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": base["rope_theta"],
                "partial_rotary_factor": sum(each == 1.0 for each in turning) / len(turning),
            },
        },
    }
    if not meta.optional_int("expert_count"):
        return {**GEMMA, **own}
    experts = mixture(meta, base)
    return {**GEMMA, **own, **experts, "enable_moe_block": True, "top_k_experts": experts["num_experts_per_tok"]}


def llama4(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    """Numbers that all releases share are not in files: of chunks, and of how queries grow."""
    experts, layers = mixture(meta, base), range(meta.num_layers)
    is_whole = meta.values.get("attention.sliding_window") == 0
    return {
        **experts,
        "intermediate_size": experts["moe_intermediate_size"],
        "intermediate_size_mlp": base["intermediate_size"],
        "moe_layers": [layer for layer in layers if f"blk.{layer}.ffn_gate_inp.weight" in meta.types],
        "use_qk_norm": experts["num_experts"] != 128,
        "no_rope_layers": [1] * len(layers) if is_whole else None,
        "attention_chunk_size": None if is_whole else 8192,
    }


def ernie_moe(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    own = mixture(meta, base)
    return {
        **own,
        "moe_num_experts": own["num_experts"],
        "moe_k": own["num_experts_per_tok"],
        "moe_num_shared_experts": meta.optional_int("expert_shared_count") or 0,
        "moe_layer_start_index": meta.optional_int("leading_dense_block_count") or 0,
        "moe_layer_interval": meta.positive("interleave_moe_layer_step", 1),
    }


def falcon(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    up = meta.types.get("blk.0.ffn_up.weight")
    return {
        "new_decoder_architecture": True,
        "num_kv_heads": base["num_key_value_heads"],
        "num_ln_in_parallel_attn": 1 + meta.has("attn_norm_2.weight"),
        "layer_norm_epsilon": base["layer_norm_eps"],
        "bias": meta.has("attn_qkv.bias"),
        "ffn_hidden_size": up.shape[0] if up is not None else None,
    }
