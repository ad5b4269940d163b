"""Small sizes that families share, as transformers' config classes name them."""

from __future__ import annotations

from typing import Any

GEMMA: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 7,
    "query_pre_attn_scalar": 20,
    "layer_types": ["sliding_attention", "full_attention"],
}
WINDOWS_IN_TWO: dict[str, Any] = {
    "num_hidden_layers": 3,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
DELTA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_key_value_heads": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
QWEN_LINEAR: dict[str, Any] = {**DELTA, "head_dim": 16}
FOUR_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
LFM: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "num_key_value_heads": 2,
    "conv_L_cache": 3,
}
LATENT_UNCOUNTED: dict[str, Any] = {
    **LATENT,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.7,
}
LATENT_EXPERTS: dict[str, Any] = {**LATENT_UNCOUNTED, "n_routed_experts": 8}
GRANITE_SWA: dict[str, Any] = {
    **WINDOWS_IN_TWO,
    "num_key_value_heads": 2,
    "layer_rope_theta": [10_000.0, 0, 500.0],
    "attention_multiplier": 0.15,
}
CORRECTED: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
LATER_EXPERTS: dict[str, Any] = {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
INDEXED: dict[str, Any] = {"index_topk": 12, "index_n_heads": 12, "index_head_dim": 8}
SIX: dict[str, Any] = {"num_key_value_heads": 2, "num_local_experts": 6, "num_experts_per_tok": 2}
WIDE: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16}
GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 2}
LINEAR_FIRST: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}


def of(
    name: str, *shared: dict[str, Any], config: str | None = None, model: str | None = None, **own: Any
) -> tuple[str, str, dict[str, Any]]:
    """Return transformers\' config class of a name, its model class, and sizes: those of `shared`, and `own`."""
    sizes = {key: value for each in (*shared, own) for key, value in each.items()}
    return config or f"{name}Config", model or f"{name}ForCausalLM", sizes


BLOCKS: list[dict[str, Any]] = [
    {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
    {"attention": {"no_op": True}, "ffn": {"intermediate_size": 96}},
    {"attention": {"n_heads_in_group": 1}, "ffn": {"no_op": True}},
    {"attention": {"replace_with_linear": True}, "ffn": {"intermediate_size": 64}},
    {"attention": {"num_key_value_heads": 1}, "ffn": {"replace_with_linear": True}},
]
"""Layers of Nemotron-NAS of each kind."""
