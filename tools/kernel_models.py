"""Sizes of the models whose kernels `tools/cubins.py` compiles, as their `config.json` has them, with two layers."""

from __future__ import annotations

from typing import Any, Final


def _dense(
    architecture: str, vocab_size: int, hidden_size: int, inner: int, heads: tuple[int, int, int], **more: Any
) -> dict[str, Any]:
    """heads: of queries, of keys, and their size."""
    return {
        "architectures": [architecture],
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": inner,
        "num_hidden_layers": 2,
        **dict(zip(("num_attention_heads", "num_key_value_heads", "head_dim"), heads, strict=True)),
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        **more,
    }


def _qwen3(*sizes: Any, **more: Any) -> dict[str, Any]:
    return _dense("Qwen3ForCausalLM", 151_936, *sizes, **more)


def _qwen2(*sizes: Any) -> dict[str, Any]:
    return _dense("Qwen2ForCausalLM", 151_936, *sizes)


def _llama(*sizes: Any) -> dict[str, Any]:
    return _dense("LlamaForCausalLM", 128_256, *sizes)


def _gemma(number: int, window: int, *sizes: Any, **more: Any) -> dict[str, Any]:
    kinds = ["sliding_attention", "full_attention"]
    more = {"sliding_window": window, "layer_types": kinds, "hidden_activation": "gelu_pytorch_tanh", **more}
    return _dense(f"Gemma{number}ForCausalLM", 256_000, *sizes, query_pre_attn_scalar=256, **more)


def _gpt_oss(experts: int) -> dict[str, Any]:
    kinds = ["sliding_attention", "full_attention"]
    more = {"num_local_experts": experts, "num_experts_per_tok": 4, "sliding_window": 128, "layer_types": kinds}
    return _dense("GptOssForCausalLM", 201_088, 2880, 2880, (64, 8, 64), **more)


_CAPS: Final = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_LATENT: Final = {"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}

MODELS: Final[dict[str, dict[str, Any]]] = {
    "octavo-tiny": _dense("Qwen3ForCausalLM", 3072, 256, 704, (4, 2, 64), tie_word_embeddings=True),
    "Qwen3-0.6B": _qwen3(1024, 3072, (16, 8, 128)),
    "Qwen3-1.7B": _qwen3(2048, 6144, (16, 8, 128)),
    "Qwen3-4B": _qwen3(2560, 9728, (32, 8, 128)),
    "Qwen3-8B": _qwen3(4096, 12_288, (32, 8, 128)),
    "Qwen3-14B": _qwen3(5120, 17_408, (40, 8, 128)),
    "Qwen3-32B": _qwen3(5120, 25_600, (64, 8, 128)),
    "Qwen2.5-0.5B": _qwen2(896, 4864, (14, 2, 64)),
    "Qwen2.5-1.5B": _qwen2(1536, 8960, (12, 2, 128)),
    "Qwen2.5-7B": _qwen2(3584, 18_944, (28, 4, 128)),
    "Llama-3.1-8B": _llama(4096, 14_336, (32, 8, 128)),
    "Llama-3.1-70B": _llama(8192, 28_672, (64, 8, 128)),
    "Llama-3.2-1B": _llama(2048, 8192, (32, 8, 64)),
    "Llama-3.2-3B": _llama(3072, 8192, (24, 8, 128)),
    "Phi-2": _dense(
        "PhiForCausalLM", 51_200, 2560, 10_240, (32, 32, 80), partial_rotary_factor=0.4, hidden_act="gelu_new"
    ),
    "Phi-3-mini": _dense("Phi3ForCausalLM", 32_064, 3072, 8192, (32, 32, 96)),
    "Gemma-2B": _dense("GemmaForCausalLM", 256_000, 2048, 16_384, (8, 1, 256), hidden_act="gelu_pytorch_tanh"),
    "Gemma-2-2B": _gemma(2, 4096, 2304, 9216, (8, 4, 256), **_CAPS),
    "Gemma-2-9B": _gemma(2, 4096, 3584, 14_336, (16, 8, 256), **_CAPS),
    "Gemma-3-1B": _gemma(3, 512, 1152, 6912, (4, 1, 256)),
    "Gemma-3-4B": _gemma(3, 1024, 2560, 10_240, (8, 4, 256)),
    "gpt-oss-20b": _gpt_oss(32),
    "gpt-oss-120b": _gpt_oss(128),
    "Mixtral-8x7B": _dense(
        "MixtralForCausalLM", 32_000, 4096, 14_336, (32, 8, 128), num_local_experts=8, num_experts_per_tok=2
    ),
    "Qwen3-30B-A3B": _dense(
        "Qwen3MoeForCausalLM", 151_936, 2048, 6144, (32, 4, 128),
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
    ),
    "DeepSeek-V2-Lite": _dense(
        "DeepseekV2ForCausalLM", 102_400, 2048, 10_944, (16, 16, 128),
        v_head_dim=128, moe_intermediate_size=1408, n_routed_experts=64, num_experts_per_tok=6, n_shared_experts=2,
        first_k_dense_replace=1, **_LATENT,
    ),
    "Qwen3-Next-80B-A3B": _dense(
        "Qwen3NextForCausalLM", 151_936, 2048, 5120, (16, 2, 256),
        num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512,
        norm_topk_prob=True, partial_rotary_factor=0.25, layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=32, linear_num_key_heads=16, linear_key_head_dim=128, linear_value_head_dim=128,
        linear_conv_kernel_dim=4, decoder_sparse_step=1, mlp_only_layers=[],
    ),
    "Granite-4.0-H-Micro": _dense(
        "GraniteMoeHybridForCausalLM", 100_352, 2048, 8192, (32, 8, 64),
        layer_types=["mamba", "attention"], mamba_n_heads=64, mamba_n_groups=1, mamba_d_state=128, mamba_d_head=64,
        mamba_d_conv=4, mamba_expand=2, shared_intermediate_size=8192, num_local_experts=0,
        position_embedding_type="nope", attention_multiplier=0.015625, embedding_multiplier=12.0, logits_scaling=8.0,
        residual_multiplier=0.22,
    ),
    "LFM2-1.2B": _dense(
        "Lfm2ForCausalLM", 65_536, 2048, 12_288, (32, 8, 64),
        layer_types=["conv", "full_attention"], conv_L_cache=3, conv_bias=False, block_auto_adjust_ff_dim=True,
        block_ff_dim=12_288, block_multiple_of=256, block_ffn_dim_multiplier=1.0,
    ),
}  # fmt: skip
