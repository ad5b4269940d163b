"""Tiny random checkpoints of every family, written by transformers as the hub's are, and transformers as the oracle."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

_GEMMA: dict[str, Any] = {
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
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
_QWEN_LINEAR: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
_FOUR_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
_LFM: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "num_key_value_heads": 2,
    "conv_L_cache": 3,
}
_LATENT_EXPERTS: dict[str, Any] = {
    **_LATENT,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.7,
}
_GRANITE_SWA: dict[str, Any] = {
    **WINDOWS_IN_TWO,
    "num_key_value_heads": 2,
    "layer_rope_theta": [10_000.0, 0, 500.0],
    "attention_multiplier": 0.15,
}
_CORRECTED: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "afmoe": (
        "AfmoeConfig",
        "AfmoeForCausalLM",
        {**_CORRECTED, **WINDOWS_IN_TWO, "num_experts": 8, "route_scale": 1.7, "mup_enabled": True},
    ),
    "arcee": ("ArceeConfig", "ArceeForCausalLM", {"num_key_value_heads": 2}),
    "bailing_moe_v2": (
        "SarvamMoEConfig",
        "Glm4MoeForCausalLM",
        {**_CORRECTED, "n_routed_experts": 8, "n_group": 4, "topk_group": 2},
    ),
    "axk1": (
        "AXK1Config",
        "AXK1ForCausalLM",
        {**_LATENT_EXPERTS, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
    ),
    "apertus": ("ApertusConfig", "ApertusForCausalLM", {"num_key_value_heads": 2}),
    "cohere2_moe": (
        "Cohere2MoeConfig",
        "Cohere2MoeForCausalLM",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            **WINDOWS_IN_TWO,
            "num_experts": 6,
            "num_shared_experts": 2,
            "intermediate_size": 24,
        },
    ),
    "flint": (
        "FlintConfig",
        "FlintForCausalLM",
        {
            **_CORRECTED,
            **WINDOWS_IN_TWO,
            "num_experts": 8,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [0],
        },
    ),
    "kolibri1": (
        "Kolibri1Config",
        "Kolibri1ForCausalLM",
        {
            **_CORRECTED,
            **WINDOWS_IN_TWO,
            "num_experts": 8,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "longcat_flash": (
        "LongcatFlashConfig",
        "LongcatFlashForCausalLM",
        {
            **_LATENT,
            "num_layers": 2,
            "n_routed_experts": 6,
            "head_dim": 8,
            "zero_expert_num": 2,
            "moe_topk": 3,
            "expert_ffn_hidden_size": 24,
            "routed_scaling_factor": 1.7,
        },
    ),
    "mellum": (
        "MellumConfig",
        "MellumForCausalLM",
        {
            **_CORRECTED,
            **WINDOWS_IN_TWO,
            "num_experts": 6,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "mimo_v2_flash": (
        "MiMoV2FlashConfig",
        "MiMoV2FlashForCausalLM",
        {
            **_CORRECTED,
            **WINDOWS_IN_TWO,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "v_head_dim": 12,
            "n_routed_experts": 8,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.25},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25},
            },
        },
    ),
    "minicpm3": (
        "MiniCPM3Config",
        "MiniCPM3ForCausalLM",
        {**_LATENT, "scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 20},
    ),
    "nanochat": ("NanoChatConfig", "NanoChatForCausalLM", {"num_key_value_heads": 2}),
    "phimoe": (
        "PhimoeConfig",
        "PhimoeForCausalLM",
        {
            "num_key_value_heads": 2,
            "num_local_experts": 6,
            "intermediate_size": 24,
            "attention_bias": True,
            "lm_head_bias": True,
            "router_jitter_noise": 0.2,
        },
    ),
    "exaone": ("ExaoneConfig", "LlamaForCausalLM", {"num_key_value_heads": 2}),
    "bloom": ("BloomConfig", "BloomForCausalLM", {}),
    "mpt": ("MptConfig", "MptForCausalLM", {"max_seq_len": 256}),
    "falcon": ("FalconConfig", "FalconForCausalLM", {"ffn_hidden_size": 56}),
    "gpt_bigcode": ("GPTBigCodeConfig", "GPTBigCodeForCausalLM", {}),
    "gpt_neo": ("GPTNeoConfig", "GPTNeoForCausalLM", {"window_size": 7, "attention_types": [[["global", "local"], 1]]}),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", {"rotary_dim": 4}),
    "helium": ("HeliumConfig", "HeliumForCausalLM", {"num_key_value_heads": 2, "head_dim": 8}),
    "hyperclovax": (
        "HyperCLOVAXConfig",
        "HyperCLOVAXForCausalLM",
        {
            "num_key_value_heads": 2,
            "embedding_multiplier": 10.0,
            "logits_scaling": 0.125,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.15,
        },
    ),
    "jais2": ("Jais2Config", "Jais2ForCausalLM", {"num_key_value_heads": 2}),
    "olmo": ("OlmoConfig", "OlmoForCausalLM", {"num_key_value_heads": 2, "clip_qkv": 1.0}),
    "vaultgemma": ("VaultGemmaConfig", "VaultGemmaForCausalLM", _GEMMA),
    "cwm": ("CwmConfig", "CwmForCausalLM", {"num_key_value_heads": 2, "head_dim": 16, **WINDOWS_IN_TWO}),
    "bamba": (
        "BambaConfig",
        "BambaForCausalLM",
        {**_MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1], "num_key_value_heads": 2},
    ),
    "cohere": ("CohereConfig", "CohereForCausalLM", {"num_key_value_heads": 2}),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM", {"num_key_value_heads": 2, **WINDOWS_IN_TWO}),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", {**_LATENT_EXPERTS, "first_k_dense_replace": 1}),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**_LATENT_EXPERTS, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
    ),
    "deepseek_v32": (
        "DeepseekV32Config",
        "DeepseekV32ForCausalLM",
        {
            **_LATENT_EXPERTS,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "index_topk": 96,
            "index_n_heads": 2,
            "index_head_dim": 16,
        },
    ),
    "dots1": (
        "Dots1Config",
        "Dots1ForCausalLM",
        {
            **_CORRECTED,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "sliding_window": None,
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        "Ernie4_5_MoeForCausalLM",
        {
            "num_key_value_heads": 2,
            "num_hidden_layers": 3,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 24,
        },
    ),
    "exaone_moe": (
        "ExaoneMoeConfig",
        "ExaoneMoeForCausalLM",
        {**_CORRECTED, **WINDOWS_IN_TWO, "num_experts": 8, "n_group": 4, "topk_group": 2},
    ),
    "flex_olmo": (
        "FlexOlmoConfig",
        "FlexOlmoForCausalLM",
        {"num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24},
    ),
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        "GlmMoeDsaForCausalLM",
        {
            **_LATENT_EXPERTS,
            "first_k_dense_replace": 1,
            "index_topk": 96,
            "index_n_heads": 2,
            "index_head_dim": 16,
        },
    ),
    "hunyuan_v1_dense": (
        "HunYuanDenseV1Config",
        "HunYuanDenseV1ForCausalLM",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": 50.0, "factor": 1.0},
        },
    ),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1Config",
        "HunYuanMoEV1ForCausalLM",
        {"num_key_value_heads": 2, "head_dim": 16, "num_experts": 6, "moe_topk": 2},
    ),
    "hy_v3": ("HYV3Config", "HYV3ForCausalLM", {**_CORRECTED, "num_experts": 8}),
    "minimax": (
        "MiniMaxConfig",
        "MiniMaxForCausalLM",
        {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_key_value_heads": 2,
            "num_local_experts": 6,
            "intermediate_size": 24,
            "linear_attn_alpha_factor": 3.5,
            "full_attn_beta_factor": 0.8,
            "mlp_alpha_factor": 2.5,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        "MiniMaxM2ForCausalLM",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "rotary_dim": 8,
        },
    ),
    "sarvam_mla": ("SarvamMLAConfig", "DeepseekV3ForCausalLM", {**_LATENT_EXPERTS, "q_lora_rank": None}),
    "solar_open": ("SolarOpenConfig", "SolarOpenForCausalLM", {**_CORRECTED, "n_routed_experts": 8}),
    "ernie4_5": ("Ernie4_5Config", "Ernie4_5ForCausalLM", {"num_key_value_heads": 2, "head_dim": 16}),
    "exaone4": ("Exaone4Config", "Exaone4ForCausalLM", {"num_key_value_heads": 2, **WINDOWS_IN_TWO}),
    "falcon_h1": (
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {**_MAMBA, "num_key_value_heads": 2, "mamba_d_ssm": 48, "mamba_d_head": 12},
    ),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {"num_key_value_heads": 1, "head_dim": 16}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", _GEMMA),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", _GEMMA),
    "gemma3n": (
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_key_value_heads": 2,
            "head_dim": 8,  # scores are not scaled
            "sliding_window": 7,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 120,  # tokens behind these have the first one's embedding
            "activation_sparsity_pattern": [0.8, 0.8, 0.0, 0.0, 0.6, 0.0],
            "laurel_rank": 8,
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            **_GEMMA,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "head_dim": 8,  # scores are not scaled
            "global_head_dim": 16,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 300,
            "use_double_wide_mlp": True,
        },
    ),
    "gemma4_moe": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            **_GEMMA,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "head_dim": 8,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "glm": ("GlmConfig", "GlmForCausalLM", {"num_key_value_heads": 2, "head_dim": 16}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", _LATENT_EXPERTS),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", {"num_key_value_heads": 2, "head_dim": 16}),
    "glm4_moe": (
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.7,
            "n_group": 4,
            "topk_group": 2,
            "use_qk_norm": True,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
            "swiglu_limit": 1.5,
        },
    ),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {}),
    "granite": (
        "GraniteConfig",
        "GraniteForCausalLM",
        {
            "num_key_value_heads": 2,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.15,
            "residual_multiplier": 0.22,
            "logits_scaling": 6.0,
        },
    ),
    "ministral": (
        "MinistralConfig",
        "MinistralForCausalLM",
        {"num_key_value_heads": 2, "head_dim": 8, **WINDOWS_IN_TWO},
    ),
    "ministral3": (
        "Ministral3Config",
        "Ministral3ForCausalLM",
        {
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "mamba": ("MambaConfig", "MambaForCausalLM", {"num_hidden_layers": 3, "state_size": 8, "time_step_rank": 4}),
    "falcon_mamba": (
        "FalconMambaConfig",
        "FalconMambaForCausalLM",
        {"num_hidden_layers": 3, "state_size": 8, "time_step_rank": 4, "tie_word_embeddings": False},
    ),
    "jamba": (
        "JambaConfig",
        "JambaForCausalLM",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "num_key_value_heads": 2,
            "num_experts": 4,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
    ),
    "mamba2": (
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {"num_hidden_layers": 3, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2},
    ),
    "minicpm": (
        "GraniteConfig",
        "GraniteForCausalLM",
        {
            "num_key_value_heads": 2,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 8**-0.5,
            "residual_multiplier": 1.4 / 2**0.5,
            "logits_scaling": 32 / 20,
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 20,
        },
    ),
    "mistral4": (
        "Mistral4Config",
        "Mistral4ForCausalLM",
        {
            **_LATENT_EXPERTS,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
                "partial_rotary_factor": 0.4,
            },
        },
    ),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {"num_key_value_heads": 2, "num_local_experts": 6, "num_experts_per_tok": 2},
    ),
    "nemotron": ("NemotronConfig", "NemotronForCausalLM", {"num_key_value_heads": 2}),
    "nemotron_h": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "mlp", "full_attention", "moe"],
            "num_key_value_heads": 2,
            "head_dim": 8,
            "ssm_state_size": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 12,
            "n_groups": 2,
            "n_routed_experts": 4,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
        },
    ),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {"num_key_value_heads": 2}),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM", {"num_key_value_heads": 2, **WINDOWS_IN_TWO}),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        "OlmoHybridForCausalLM",
        {
            **{name: value for name, value in _QWEN_LINEAR.items() if name != "head_dim"},
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
        },
    ),
    "olmoe": (
        "OlmoeConfig",
        "OlmoeForCausalLM",
        {"num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24},
    ),
    "phi": ("PhiConfig", "PhiForCausalLM", {"num_key_value_heads": 2}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"num_key_value_heads": 2}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {
            "num_key_value_heads": 2,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
    ),
    "seed_oss": ("SeedOssConfig", "SeedOssForCausalLM", {"num_key_value_heads": 2, "head_dim": 16}),
    "step3p5": (
        "Step3p7TextConfig",
        "Step3p7ForConditionalGeneration",
        {
            **_CORRECTED,
            **WINDOWS_IN_TWO,
            "n_routed_experts": 8,
            "num_sliding_attention_heads": 8,
            "share_expert_dim": 40,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "moe_router_scaling_factor": 1.7,
            "swiglu_limits": [0, 0, 0.7],
            "swiglu_limits_shared": [1.2, None, 0.9],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "smollm3": (
        "SmolLM3Config",
        "SmolLM3ForCausalLM",
        {"num_key_value_heads": 2, "num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]},
    ),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", {"num_key_value_heads": 2, "partial_rotary_factor": 0.5}),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", {"num_key_value_heads": 2}),
    "granitemoe": (
        "GraniteMoeConfig",
        "GraniteMoeForCausalLM",
        {"num_key_value_heads": 2, "num_local_experts": 6, "num_experts_per_tok": 2},
    ),
    "granitemoeshared": (
        "GraniteMoeSharedConfig",
        "GraniteMoeSharedForCausalLM",
        {
            "num_key_value_heads": 2,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 40,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            **_MAMBA,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_key_value_heads": 2,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 56,
            "position_embedding_type": "nope",
        },
    ),
    "granite_swa": (
        "GraniteSWAConfig",
        "GraniteSWAForCausalLM",
        {**_GRANITE_SWA, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 6.0},
    ),
    "granitemoe_swa": (
        "GraniteMoeSWAConfig",
        "GraniteMoeSWAForCausalLM",
        {**_GRANITE_SWA, "num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 40},
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {
            **{name: value for name, value in _LATENT_EXPERTS.items() if name != "n_routed_experts"},
            "q_lora_rank": None,
            "num_local_experts": 8,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_heads": 4,
            "linear_head_dim": 8,
        },
    ),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", _LFM),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        "Lfm2MoeForCausalLM",
        {**_LFM, "num_dense_layers": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "lfm3": (
        "Lfm3Config",
        "Lfm3ForCausalLM",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
            "num_key_value_heads": 2,
            "head_dim": 16,
            "conv_L_cache": 3,
            "sliding_window": 7,
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_local_experts": 6,
            "intermediate_size": 24,
            "intermediate_size_mlp": 48,
            "moe_layers": [0, 1, 3],
            "attention_chunk_size": 96,
            "floor_scale": 16,
        },
    ),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 2}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 7}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"num_key_value_heads": 1}),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _QWEN_LINEAR),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        {**_QWEN_LINEAR, **_FOUR_EXPERTS},
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {**_QWEN_LINEAR, **_FOUR_EXPERTS, "mlp_only_layers": [0], "decoder_sparse_step": 1},
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"num_key_value_heads": 2, "head_dim": 16}),
    "opt": ("OPTConfig", "OPTForCausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {}),
    "youtu": ("YoutuConfig", "YoutuForCausalLM", {**_LATENT, "pad_token_id": None}),
}
"""Family → transformers' config class, its model class, sizes of its own."""
_OTHER_ARCHITECTURES = {
    "bailing_moe_v2": "BailingMoeV2ForCausalLM",
    "exaone": "ExaoneForCausalLM",
    "minicpm": "MiniCPMForCausalLM",
    "sarvam_mla": "SarvamMLAForCausalLM",
    "step3p5": "Step3p5ForCausalLM",
}
"""Architectures of the hub whose class in transformers has another name."""

_DEBERTA = {"relative_attention": True, "position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True}
_DEBERTA |= {"pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
ENCODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    family.lower(): (f"{family}Config", f"{family}Model", {})
    for family in (
        *("Bert", "DistilBert", "Gte", "JinaEmbeddingsV3", "MPNet", "ModernBert", "NomicBert", "Roberta", "XLMRoberta"),
    )
}
ENCODERS["debertav2"] = ("DebertaV2Config", "DebertaV2Model", _DEBERTA)
"""Families that make vectors, whose tokens see those behind them."""
WITH_ENCODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "whisper": (
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 40,
            "num_mel_bins": 8,
            "max_source_positions": 37,
            "decoder_start_token_id": 3,
            "begin_suppress_tokens": None,
        },
    ),
}
"""Likewise, families that read sound."""

ALWAYS = ("gemma3", "gpt2", "llama", "mistral", "opt", "qwen2", "qwen3")
"""Families that are run in every way; of the others, which share their parts, tests run a selection."""

ALTERNATING: dict[str, Any] = {
    "num_hidden_layers": 4,
    "use_sliding_window": True,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
"""Overrides for families with `layer_types`: layers with a window alternate with layers that see all."""

_COMMON: dict[str, Any] = {
    "vocab_size": 130,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GPT2_WORDS = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
_OWN_WORDS = {
    "gpt_neo": {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"},
    "bloom": {"intermediate_size": None},
    "mpt": {"intermediate_size": None, "max_position_embeddings": None},
    "gpt2": _GPT2_WORDS,
    "gpt_bigcode": _GPT2_WORDS,
    "gptj": _GPT2_WORDS,
    "longcat_flash": {"intermediate_size": "ffn_hidden_size", "num_hidden_layers": None},
    "kolibri1": {"intermediate_size": None},
    "opt": {"intermediate_size": None},
    "whisper": {
        "hidden_size": "d_model",
        "intermediate_size": "decoder_ffn_dim",
        "num_hidden_layers": "decoder_layers",
        "num_attention_heads": None,
        "max_position_embeddings": "max_target_positions",
    },
}


def family_config(family: str, **overrides: Any) -> Any:
    """transformers' config of a small model of `family`; `overrides` are keys of it."""
    import transformers

    config_name, model_name, own = (FAMILIES | WITH_ENCODERS | ENCODERS)[family]
    words = _OWN_WORDS.get(family, {})
    sizes = {words.get(key, key): value for key, value in {**_COMMON, **own, **overrides}.items()}
    sizes.pop(None, None)
    architecture = _OTHER_ARCHITECTURES.get(family, model_name)
    return getattr(transformers, config_name)(**sizes, architectures=[architecture])


_MADE: dict[str, dict[str, bytes]] = {}
"""The files of checkpoints that were made in this process: many tests make the same ones."""


def make_checkpoint(
    family: str, path: Path, *, seed: int = 0, dtype: str = "float32", max_shard_size: str = "50GB", **overrides: Any
) -> Path:
    """Write a random model of `family` to `path` and answer `path`; `overrides` are keys of its config.

    Weights are spread wider than those of a fresh model, so that logits differ clearly and no vector is all ones or
    zeros. Dimensions: vocabulary 130, hidden 32, two layers, four heads, 256 positions.
    """
    key = repr((family, seed, dtype, max_shard_size, sorted(overrides.items())))
    if key not in _MADE:
        with TemporaryDirectory() as folder:
            _save_checkpoint(Path(folder), family, seed, dtype, max_shard_size, overrides)
            _MADE[key] = {file.name: file.read_bytes() for file in Path(folder).iterdir()}
    path.mkdir(parents=True, exist_ok=True)
    for name, content in _MADE[key].items():
        (path / name).write_bytes(content)
    return path


def _save_checkpoint(
    path: Path, family: str, seed: int, dtype: str, max_shard_size: str, overrides: Mapping[str, Any]
) -> None:
    import torch
    import transformers

    config = family_config(family, **overrides)
    if family == "step3p5":  # whose text model has no class of its own with a head
        vision = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 28}
        config = transformers.Step3p7Config(text_config=config.to_dict(), vision_config=vision)
    model = getattr(transformers, (FAMILIES | WITH_ENCODERS | ENCODERS)[family][1])(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        corrections = [each for each in model.named_buffers() if each[0].endswith("correction_bias")]
        for name, parameter in (*model.named_parameters(), *corrections):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(noise * 0.2 + (0.0 if name.endswith("bias") else 1.0))
            else:
                parameter.copy_(noise * 2.0 / parameter.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.to(getattr(torch, dtype)).save_pretrained(path, max_shard_size=max_shard_size)
    if family in _OTHER_ARCHITECTURES:
        edit_config(path, architectures=[_OTHER_ARCHITECTURES[family]])


def load_oracle(path: Path) -> Any:
    """The checkpoint as transformers reads it, in float32 with its plainest attention."""
    import torch
    import transformers

    # this class is not among those that AutoModelForCausalLM chooses from
    config = json.loads((path / "config.json").read_text())
    is_mistral4 = config["architectures"] == ["Mistral4ForCausalLM"]
    attention = "sdpa" if config.get("alibi") else "eager"  # which adds Falcon's slopes twice
    loader = transformers.Mistral4ForCausalLM if is_mistral4 else transformers.AutoModelForCausalLM
    if config["model_type"] == "step3p7":
        loader = transformers.AutoModelForImageTextToText
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = loader.from_pretrained(path, dtype=torch.float32, attn_implementation=attention)
    module = sys.modules[type(model).__module__]
    if hasattr(module, "torch_recurrent_gated_delta_rule"):  # in pieces of 64 tokens it is further from the formula
        module.torch_chunk_gated_delta_rule = module.torch_recurrent_gated_delta_rule  # type: ignore[attr-defined]
    return model.eval()


def edit_config(path: Path, remove: tuple[str, ...] = (), **changes: Any) -> None:
    """Change keys of the checkpoint's config.json."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    for name in remove:
        config.pop(name, None)
    file.write_text(json.dumps({**config, **changes}))


def to_old_layout(path: Path) -> None:
    """Rewrite config.json as older releases did: `rope_theta` beside `rope_scaling`, and `torch_dtype`."""
    config = json.loads((path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    (path / "config.json").write_text(json.dumps(config))


def edit_tensors(path: Path, remove: tuple[str, ...] = (), **changes: Any) -> None:
    """Rewrite model.safetensors without the tensors `remove` and with `changes` (`name=tensor`)."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    for name in remove:
        del tensors[name]
    save_file({**tensors, **changes}, path / "model.safetensors", metadata={"format": "pt"})


def rename_tensors(path: Path, old_prefix: str, new_prefix: str) -> None:
    """Replace what stands before the names in model.safetensors."""
    from safetensors.torch import load_file, save_file

    tensors = {
        (new_prefix + name.removeprefix(old_prefix) if name.startswith(old_prefix) else name): tensor
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def to_layout_with_images(path: Path, architecture: str, prefix: str = "model.language_model.", **text: Any) -> None:
    """Rewrite a checkpoint as the text model of one that reads images too.

    `prefix` stands before the names of the text model; `text` replaces keys of its config, None removes one.
    """
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((path / "config.json").read_text())
    outer = {"architectures": [architecture], "model_type": "outer", "dtype": config.pop("dtype"), "eos_token_id": 2}
    del config["architectures"]
    nested = {name: value for name, value in {**config, **text}.items() if value is not None}
    outer.update(vision_config={"hidden_size": 8, "num_hidden_layers": 1}, text_config=nested)
    (path / "config.json").write_text(json.dumps(outer))
    head = prefix.removesuffix("model.") if prefix.startswith("language_model.") else ""
    renamed = {
        prefix + name.removeprefix("model.") if name.startswith("model.") else head + name: tensor
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    beside = "model." if prefix.startswith("model.") else ""
    for part in ("vision_tower.encoder.layers.0.fc1.weight", "vision_tower.norm.bias", "multi_modal_projector.weight"):
        renamed[beside + part] = torch.ones(8)
    save_file(renamed, path / "model.safetensors", metadata={"format": "pt"})


def to_pytorch_archive(path: Path) -> None:
    """Replace model.safetensors by pytorch_model.bin."""
    import torch
    from safetensors.torch import load_file

    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
