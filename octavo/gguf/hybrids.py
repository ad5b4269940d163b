"""What a config.json would say of the metadata of llama.cpp's architectures with states.

A function returns what an architecture's config has beyond the common keys `base`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from octavo.gguf import configs
from octavo.gguf.metadata import Metadata


def mamba(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    return {
        "state_size": meta.positive("ssm.state_size"),
        "conv_kernel": meta.positive("ssm.conv_kernel"),
        "intermediate_size": meta.positive("ssm.inner_size"),
        "time_step_rank": meta.positive("ssm.time_step_rank"),
        "layer_norm_epsilon": base["rms_norm_eps"],
        "use_bias": meta.has("ssm_in.bias"),
        "use_conv_bias": meta.has("ssm_conv1d.bias"),
    }


def jamba(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    inner, hidden = meta.positive("ssm.inner_size"), base["hidden_size"]
    if inner % hidden:
        raise meta.error("ssm.inner_size", f"a multiple of embedding_length, which is {hidden}")
    return {
        **(configs.mixture(meta, base) if meta.optional_int("expert_count") else {"num_experts": 1}),
        **_period(meta, "attn_layer", "attn_q.weight"),
        **_period(meta, "expert_layer", "ffn_gate_inp.weight"),
        "mamba_expand": inner // hidden,
        "mamba_d_state": meta.positive("ssm.state_size"),
        "mamba_d_conv": meta.positive("ssm.conv_kernel"),
        "mamba_dt_rank": meta.positive("ssm.time_step_rank"),
        "mamba_conv_bias": meta.has("ssm_conv1d.bias"),
        "mamba_proj_bias": meta.has("ssm_in.bias"),
    }


def _period(meta: Metadata, name: str, tensor: str) -> Mapping[str, int]:
    """Return the first layer that has a tensor, and how many layers later the next one has it."""
    layers = range(meta.positive("block_count"))
    found = [layer for layer in layers if f"blk.{layer}.{tensor}" in meta.types] or [len(layers)]
    period = found[1] - found[0] if len(found) > 1 else len(layers) + 1
    return {f"{name}_offset": found[0], f"{name}_period": period}


def mamba2(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    own = _scan(meta)
    return {
        "num_heads": own["heads"],
        "n_groups": own["groups"],
        "head_dim": own["dim"],
        "state_size": own["states"],
        "conv_kernel": own["taps"],
        "expand": own["inner"] // base["hidden_size"],
        "layer_norm_epsilon": base["rms_norm_eps"],
        "use_bias": meta.has("ssm_in.bias"),
        "use_conv_bias": meta.has("ssm_conv1d.bias"),
    }


def nemotron_h(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    own, tensors = _scan(meta), {"ssm_in": "mamba", "attn_q": "attention", "ffn_gate_inp": "moe", "ffn_up": "mlp"}
    kinds = [next((tensors[each] for each in tensors if has(each)), "mlp") for has in _layers(meta)]
    widths = (tensor.shape[0] for name, tensor in meta.types.items() if name.endswith(".ffn_up.weight"))
    mixture: dict[str, Any] = {}
    if "moe" in kinds:
        mixture = {
            **configs.glm4moe(meta, base),
            "moe_shared_expert_intermediate_size": meta.positive("expert_shared_feed_forward_length"),
            "moe_latent_size": meta.optional_int("moe_latent_size") or None,
        }
    return {
        **mixture,
        "layers_block_type": kinds,
        "intermediate_size": next(widths, base["intermediate_size"]),
        "mamba_num_heads": own["heads"],
        "mamba_head_dim": own["dim"],
        "n_groups": own["groups"],
        "ssm_state_size": own["states"],
        "conv_kernel": own["taps"],
        "use_conv_bias": any(has("ssm_conv1d", "bias") for has in _layers(meta)),
        "use_bias": any(has("ssm_in", "bias") for has in _layers(meta)),
        "mlp_bias": any(has("ffn_up", "bias") for has in _layers(meta)),
        "attention_bias": any(has("attn_q", "bias") for has in _layers(meta)),
        "layer_norm_epsilon": base["rms_norm_eps"],
    }


def falcon_h1(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    """The converter has multiplied the weights with all factors of the model."""
    own = {**_scan_of_layers(meta), "mamba_d_ssm": meta.positive("ssm.inner_size")}
    norms = {"mamba_rms_norm": meta.has("ssm_norm.weight"), "mamba_norm_before_gate": False}
    return {**own, **norms, "projectors_bias": meta.has("ssm_out.bias"), "mlp_bias": meta.has("ffn_up.bias")}


def granite_hybrid(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    """Files of Bamba are of this architecture too, and differ in that heads turn."""
    common = {**_scan_of_layers(meta), "layer_types": _kinds(meta, "ssm_in")}
    if meta.bool("rope.scaling.finetuned", True):
        return {**common, **configs.partial(meta, base)}
    experts = configs.mixture(meta, base) if meta.optional_int("expert_count") else {"num_local_experts": 0}
    shared = meta.optional_int("expert_shared_feed_forward_length") or base["intermediate_size"]
    own = {"shared_intermediate_size": shared, "position_embedding_type": "nope"}
    return {**configs.granite(meta, base), **experts, **common, **own}


def lfm2(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    own = {
        "layer_types": _kinds(meta, "shortconv.conv"),
        "conv_L_cache": meta.positive("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
        "conv_bias": any(has("shortconv.conv", "bias") for has in _layers(meta)),
        "tie_embedding": base["tie_word_embeddings"],
    }
    if not meta.optional_int("expert_count"):
        return own
    mixture = {
        **configs.mixture(meta, base),
        "num_dense_layers": meta.optional_int("leading_dense_block_count") or 0,
        "use_expert_bias": any(has("exp_probs_b", "bias") for has in _layers(meta)),
        "norm_topk_prob": meta.bool("expert_weights_norm", True),
        "routed_scaling_factor": meta.positive_float("expert_weights_scale", 1.0),
    }
    return {**own, **mixture}


def kimi_linear(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    sizes = {
        "num_heads": base["num_attention_heads"],
        "head_dim": meta.positive("kda.head_dim"),
        "short_conv_kernel_size": meta.positive("ssm.conv_kernel"),
    }
    own = configs.deepseek(meta, base)
    return {
        **own,
        "linear_attn_config": sizes,
        "layer_types": _kinds(meta, "ssm_conv1d_q"),
        "num_shared_experts": own["n_shared_experts"],
        "norm_topk_prob": meta.bool("expert_weights_norm", True),
        "mla_use_nope": True,
        "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


def qwen35(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    heads, inner = meta.positive("ssm.time_step_rank"), meta.positive("ssm.inner_size")
    own = {
        **configs.partial(meta, base),
        "layer_types": _kinds(meta, "ssm_conv1d"),
        "linear_num_value_heads": heads,
        "linear_num_key_heads": meta.positive("ssm.group_count"),
        "linear_key_head_dim": meta.positive("ssm.state_size"),
        "linear_value_head_dim": max(1, inner // heads),
        "linear_conv_kernel_dim": meta.positive("ssm.conv_kernel"),
    }
    sections = meta.array("rope.dimension_sections")
    if sections is not None and 2 * sum(sections[:3]) == meta.values.get("rope.dimension_count"):
        own |= configs.sections(meta, base)
    if not meta.optional_int("expert_count"):
        return own
    shared = meta.positive("expert_shared_feed_forward_length", base["intermediate_size"])
    return {**own, **configs.qwen3moe(meta, base), "shared_expert_intermediate_size": shared}


def _scan(meta: Metadata) -> dict[str, int]:
    """Return the sizes of Mamba2. Raises CheckpointError."""
    heads, inner = meta.positive("ssm.time_step_rank"), meta.positive("ssm.inner_size")
    if inner % heads:
        raise meta.error("ssm.inner_size", f"a multiple of ssm.time_step_rank, which is {heads}")
    own = {"groups": "group_count", "states": "state_size", "taps": "conv_kernel"}
    sizes = {ours: meta.positive(f"ssm.{theirs}") for ours, theirs in own.items()}
    return {**sizes, "heads": heads, "inner": inner, "dim": inner // heads}


def _scan_of_layers(meta: Metadata) -> dict[str, Any]:
    """Return the keys of a config that begin with mamba_."""
    own = _scan(meta)
    return {
        "mamba_n_heads": own["heads"],
        "mamba_n_groups": own["groups"],
        "mamba_d_state": own["states"],
        "mamba_d_head": own["dim"],
        "mamba_d_conv": own["taps"],
        "mamba_expand": own["inner"] / meta.positive("embedding_length"),
        "mamba_proj_bias": any(has("ssm_in", "bias") for has in _layers(meta)),
        "mamba_conv_bias": any(has("ssm_conv1d", "bias") for has in _layers(meta)),
    }


def _kinds(meta: Metadata, tensor: str) -> list[str]:
    """Return the kind of each layer: those that have a tensor keep states."""
    return ["linear_attention" if has(tensor) else "full_attention" for has in _layers(meta)]


def _layers(meta: Metadata) -> list[Callable[..., bool]]:
    """Return a function for each layer that says whether it has a tensor, given the tensor's name and suffix."""

    def has(layer: int, tensor: str, suffix: str = "weight") -> bool:
        return f"blk.{layer}.{tensor}.{suffix}" in meta.types

    return [partial(has, layer) for layer in range(meta.num_layers)]
