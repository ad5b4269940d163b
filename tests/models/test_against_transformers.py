"""Every family computes what transformers computes, however the work is cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.checkpoints import (
    edit_config,
    load_oracle,
    make_checkpoint,
    rename_tensors,
    to_old_layout,
    to_pytorch_archive,
)
from tests.fakes.families import ALTERNATING, WINDOWS_IN_TWO
from tests.models.paged_run import BLOCK_SIZE, PagedRun, Stream, load

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}
PARTIAL = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
WINDOW = {"use_sliding_window": True, "sliding_window": 7}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
FALCON: dict[str, Any] = {
    "mamba_rms_norm": True,
    "mamba_norm_before_gate": False,
    "mamba_proj_bias": True,
    "projectors_bias": True,
    "attention_bias": True,
    "mlp_bias": True,
    "ssm_multipliers": [0.5, 0.8, 1.2, 0.9, 1.1],
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.6,
    "mlp_multipliers": [0.7, 1.4],
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 1.2,
    "key_multiplier": 0.5,
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.5,
    "time_step_limit": [0.2, 2.0],
}
GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
    "position_embedding_type": "rope",
    "mamba_conv_bias": False,
    "mamba_proj_bias": True,
    "attention_bias": True,
}
BAMBA: dict[str, Any] = {
    "attention_bias": True,
    "mlp_bias": True,
    "mamba_conv_bias": False,
    "mamba_proj_bias": True,
    "time_step_limit": [0.2, 2.0],
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": ("bamba", {}),
    "bamba with biases": ("bamba", BAMBA),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {}),
    "gemma2 with narrow caps": ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    "gemma2 without caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("gemma3", {"rope_parameters": GEMMA3_ROPE}),
    "gemma3n": ("gemma3n", {}),
    "gemma3n with another stream, and widths of its own": (
        "gemma3n",
        {
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "num_kv_shared_layers": 0,
            "intermediate_size": [56, 40, 56, 40, 48, 64],
            "final_logit_softcapping": 5.0,
            "rope_parameters": GEMMA3_ROPE,
            "tie_word_embeddings": False,
            "attention_bias": True,
        },
    ),
    "gemma4": ("gemma4", {}),
    "gemma4 with layers whose numbers have two digits": (
        "gemma4",
        {"num_hidden_layers": 12, "layer_types": ["sliding_attention", "full_attention"] * 6},
    ),
    "gemma4 with keys as values": (
        "gemma4",
        {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma4 with experts": ("gemma4_moe", {}),
    "gpt_oss": (
        "gpt_oss",
        {"rope_parameters": {**YARN, "truncate": False, "beta_fast": 16.0, "attention_factor": 1.1}},
    ),
    "gemma3 untied, with biases": ("gemma3", {"attention_bias": True, "tie_word_embeddings": False}),
    "granitemoe": ("granitemoe", {}),
    "granitemoe with factors": ("granitemoe", {"residual_multiplier": 0.4, "logits_scaling": 2.0}),
    "granitemoeshared": ("granitemoeshared", {}),
    "granitemoehybrid": ("granitemoehybrid", {"intermediate_size": 24}),
    "granitemoehybrid without experts": ("granitemoehybrid", {"num_local_experts": 0}),
    "granitemoehybrid with factors and positions": ("granitemoehybrid", {**GRANITE, "num_local_experts": 0}),
    "kimi_linear": ("kimi_linear", {}),
    "kimi_linear with groups and queries in two steps": (
        "kimi_linear",
        {"q_lora_rank": 20, "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "mlp_layer_types": ["sparse"] * 3},
    ),
    "lfm2": ("lfm2", {"block_multiple_of": 8}),
    "lfm2 with biases": ("lfm2", {"conv_bias": True, "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("lfm2_moe", {}),
    "lfm3": ("lfm3", {}),
    "lfm3 without gates and norms": (
        "lfm3",
        {"use_attention_gate": False, "use_sandwich_norm": False, "conv_bias": True},
    ),
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama with llama3 positions": ("llama", {"rope_parameters": LLAMA3}),
    "llama with linear positions": ("llama", {"rope_parameters": LINEAR}),
    "llama with a factor that plain positions ignore": ("llama", {"rope_parameters": PARTIAL}),
    "llama with dynamic positions": ("llama", {"rope_parameters": DYNAMIC}),
    "qwen3_5": ("qwen3_5", {}),
    "qwen3_5_moe": ("qwen3_5_moe", {}),
    "qwen4_exp": ("qwen4_exp", {}),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3 with yarn positions": ("qwen3", {"rope_parameters": YARN}),
    "qwen2 with yarn positions": ("qwen2", {"rope_parameters": {**YARN, "attention_factor": 1.2, "truncate": False}}),
    "llama with biases and wide heads": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "mistral": ("mistral", {}),
    "mistral without window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3 with windows in every other layer": ("qwen3", ALTERNATING),
    "qwen2 with a window in its last layer": ("qwen2", {**WINDOW, "max_window_layers": 1}),
    "mistral with windows in every other layer": ("mistral", {**ALTERNATING, "sliding_window": 5}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "falcon_mamba": ("falcon_mamba", {}),
    "jamba": ("jamba", {}),
    "jamba without experts": ("jamba", {"num_experts": 1, "mamba_proj_bias": True, "tie_word_embeddings": True}),
    "mamba": ("mamba", {}),
    "mamba with biases": ("mamba", {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": False}),
    "mamba2": ("mamba2", {}),
    "mamba2 with biases and limits": (
        "mamba2",
        {"use_bias": True, "use_conv_bias": False, "time_step_limit": [0.2, 2.0], "tie_word_embeddings": True},
    ),
    "nemotron_h": ("nemotron_h", {}),
    "nemotron_h with latent experts": ("nemotron_h", {"moe_latent_size": 20}),
    "nemotron_h with latent experts and biases": ("nemotron_h", {"moe_latent_size": 20, "mlp_bias": True}),
    "olmo_hybrid": ("olmo_hybrid", {}),
    "olmo_hybrid with rotation and decays alone": (
        "olmo_hybrid",
        {"rope_parameters": LLAMA3, "linear_allow_neg_eigval": False, "attention_bias": True},
    ),
    "opt": ("opt", {}),
    "opt with late norms and projections": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    "opt without biases": ("opt", {"enable_bias": False, "_remove_final_layer_norm": True}),
    "zamba2 with two blocks, no rotation and no adapters of attention": (
        "zamba2",
        {
            "layers_block_type": ["hybrid"] * 3,
            "num_mem_blocks": 2,
            "use_mem_rope": False,
            "use_shared_attention_adapter": False,
            "add_bias_linear": True,
        },
    ),
    "falcon_h1": ("falcon_h1", {}),
    "falcon_h1 with factors and norms": ("falcon_h1", FALCON),
    "gpt2": ("gpt2", {}),
    "gpt2 untied": ("gpt2", {"tie_word_embeddings": False, "intermediate_size": None, "activation_function": "gelu"}),
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1],
    "long_factor": [1.5, 4.0],
    "partial_rotary_factor": 0.5,
}
BY_KIND = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {**YARN, "rope_theta": 5_000.0},
}
SCALED_YARN = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}
HALF_YARN = {**YARN, "partial_rotary_factor": 0.5}
HALF_DYNAMIC = {**DYNAMIC, "partial_rotary_factor": 0.5}
HALF_LLAMA3 = {**LLAMA3, "partial_rotary_factor": 0.5}
VARIANTS |= {
    family: (family, {})
    for family in (
        *("cohere", "cohere2", "ernie4_5", "exaone4", "glm", "glm4", "glm4_moe", "gpt_neox", "granite"),
        *("deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
        *("ministral", "ministral3", "nemotron"),
        *(
            "olmo2",
            "olmo3",
            "olmoe",
            "phi",
            "phi3",
            "phi4_multimodal",
            "seed_oss",
            "smollm3",
            "stablelm",
            "starcoder2",
            "youtu",
        ),
    )
}
VARIANTS |= {
    "aria_text": ("aria_text", {}),
    "cohere with norms and biases": ("cohere", {"use_qk_norm": True, "attention_bias": True, "logit_scale": 0.3}),
    "cohere2 by pattern": ("cohere2", {"layer_types": None, "num_hidden_layers": 4, "tie_word_embeddings": False}),
    "deepseek_v2 with groups and two shared experts": (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "n_shared_experts": 2},
    ),
    "deepseek_v3 with weights as they are": ("deepseek_v3", {"norm_topk_prob": False, "q_lora_rank": None}),
    "glm4_moe_lite with kinds of layers": ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "ernie4_5 with biases": ("ernie4_5", {"use_bias": True, "tie_word_embeddings": False}),
    "exaone4 without windows": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "glm with yarn and without biases": ("glm", {"attention_bias": False, "rope_parameters": HALF_YARN}),
    "glm with slow pairs that do not turn": ("glm", {"rope_parameters": {**PARTIAL, "rope_type": "proportional"}}),
    "glm4 with dynamic positions": ("glm4", {"rope_parameters": HALF_DYNAMIC, "tie_word_embeddings": True}),
    "glm4_moe unnormalised": (
        "glm4_moe",
        {"norm_topk_prob": False, "attention_bias": True, "use_qk_norm": False, "n_group": 1, "topk_group": 1},
    ),
    "gpt_neox one after the other": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "granite with biases": ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "ministral without layer types": ("ministral", {"layer_types": None, "num_hidden_layers": 2}),
    "nemotron with biases": ("nemotron", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "nemotron with llama3 positions": ("nemotron", {"rope_parameters": HALF_LLAMA3}),
    "olmoe normalised": ("olmoe", {"norm_topk_prob": True, "attention_bias": True}),
    "olmo2 with biases": ("olmo2", {"attention_bias": True, "rope_parameters": YARN}),
    "olmo3 with rotations by kind": ("olmo3", {"rope_parameters": BY_KIND}),
    "phi with norms": ("phi", {"qk_layernorm": True, "rope_parameters": {**LINEAR, "partial_rotary_factor": 0.5}}),
    "phi3 with longrope": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 5}),
    "phi3 with a window": ("phi3", {"sliding_window": 7, "tie_word_embeddings": True}),
    "seed_oss with all biases": ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    "smollm3 with windows": ("smollm3", {**WINDOWS_IN_TWO, "use_sliding_window": True, "attention_bias": True}),
    "stablelm in parallel": ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True, "qk_layernorm": True}),
    "starcoder2 with a window": ("starcoder2", {"sliding_window": 7, "use_bias": False, "hidden_act": "gelu"}),
    "youtu with yarn, biases and queries from the stream": (
        "youtu",
        {
            "q_lora_rank": None,
            "attention_bias": True,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
        },
    ),
    "youtu with halves that turn": ("youtu", {"rope_interleave": False}),
}
VARIANTS |= {
    family: (family, {})
    for family in (
        *(
            "afmoe",
            "arcee",
            "bailing_moe_v2",
            "bitnet",
            "cwm",
            "granite_swa",
            "granitemoe_swa",
            "llama4",
            "minicpm",
            "mistral4",
        ),
        *("deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm_moe_dsa", "hunyuan_v1_dense"),
        *("hunyuan_v1_moe", "hy_v3", "minimax_m2", "sarvam_mla", "solar_open"),
    )
}
VARIANTS |= {
    family: (family, {})
    for family in (
        *(
            "apertus",
            "apertus1p5",
            "cohere2_moe",
            "longcat_flash",
            "mellum",
            "mimo_v2_flash",
            "minicpm3",
            "nanochat",
            "phimoe",
        ),
        *("axk1", "axk2", "ernie4_5_vl_moe", "flint", "dbrx", "kolibri1", "laguna", "minimax", "muse_glimmer"),
        "bailing_hybrid",
        "modernbert-decoder",
        "step3p5",
        *("bloom", "mpt"),
        *("exaone", "falcon", "codegen", "gpt_bigcode", "gpt_neo", "gptj"),
        *("helium", "hyperclovax", "jais2", "olmo", "vaultgemma", "zamba2"),
    )
}
MSCALES = {"short_mscale": 1.2, "long_mscale": 1.2, "original_max_position_embeddings": 250}
VARIANTS |= {
    "apertus with biases": ("apertus", {"attention_bias": True, "rope_parameters": LLAMA3}),
    "cohere2_moe behind dense layers": (
        "cohere2_moe",
        {
            "mlp_layer_types": ["dense", "dense", "sparse"],
            "expert_selection_fn": "sigmoid",
            "norm_topk_prob": False,
            "shared_expert_combination_strategy": "sum",
            "prefix_dense_intermediate_size": 48,
            "rms_norm_eps": 1e-5,
        },
    ),
    "muse_glimmer with layers that do not rotate by themselves": (
        "muse_glimmer",
        {"layer_rope_theta": None, "num_hidden_layers": 5, "layer_types": ["sliding_attention"] * 5}
        | {"post_norm_eps": 0.3, "rms_norm_eps": 0.2, "qk_scale_factor": 1.5},
    ),
    "mellum with dense layers": ("mellum", {"mlp_layer_types": ["sparse", "dense", "sparse"], "norm_topk_prob": False}),
    "mimo_v2_flash with values as they are": (
        "mimo_v2_flash",
        {"num_key_value_heads": 2, "norm_topk_prob": False, "attention_value_scale": None},
    ),
    "phimoe with longrope": (
        "phimoe",
        {
            "sliding_window": 40,
            "rope_parameters": {
                **{name: value for name, value in LONG.items() if name != "partial_rotary_factor"},
                "short_factor": [1.0, 1.1, 1.3, 2.0],
                "long_factor": [1.0, 1.1, 1.3, 2.0],
                **MSCALES,
            },
        },
    ),
    "falcon with groups and two norms": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon with groups and one norm": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon one after the other": ("falcon", {"parallel_attn": False, "multi_query": False}),
    "falcon with slopes": ("falcon", {"alibi": True, "parallel_attn": False, "multi_query": False, "bias": True}),
    "mpt with six heads": ("mpt", {"hidden_size": 48, "num_attention_heads": 6, "attn_config": {"clip_qkv": 1.5}}),
    "gpt_bigcode with many heads of keys": ("gpt_bigcode", {"multi_query": False}),
    "hyperclovax without norms behind": ("hyperclovax", {"use_post_norm": False, "attention_multiplier": None}),
    "afmoe without factor": ("afmoe", {"mup_enabled": False, "num_dense_layers": 2, "attention_bias": False}),
    "laguna with a gate for each element": (
        "laguna",
        {"gating": "per-element", "num_attention_heads_per_layer": None}
        | {"mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "modernbert-decoder with biases and a head of its own": (
        "modernbert-decoder",
        dict.fromkeys(("attention_bias", "classifier_bias", "mlp_bias", "norm_bias"), True)
        | {"tie_word_embeddings": False, "layer_types": ["full_attention"] * 3 + ["sliding_attention"]},
    ),
    "modernbert-decoder without biases": ("modernbert-decoder", {"decoder_bias": False}),
    "bailing_hybrid with queries in two steps": ("bailing_hybrid", {"q_lora_rank": 20, "kda_lower_bound": -2.0}),
    "bailing_moe_v2 with half of each head turning": (
        "bailing_moe_v2",
        {"rope_parameters": PARTIAL, "attention_bias": True},
    ),
    "sarvam_mla with shared experts and queries in two steps": (
        "sarvam_mla",
        {"n_shared_experts": 2, "q_lora_rank": 20},
    ),
    "dots1 with windows": ("dots1", {"sliding_window": 7, "max_window_layers": 1, "norm_topk_prob": True}),
    "ernie4_5_moe in every other layer": ("ernie4_5_moe", {"moe_layer_interval": 2, "moe_num_shared_experts": 0}),
    "axk2 with groups that sees all": ("axk2", {"n_group": 4, "topk_group": 2, "index_topk": 256}),
    "deepseek_v32 that sees all": ("deepseek_v32", {"index_topk": 256}),
    "deepseek_v32 with a larger part of small heads that stays": (
        "deepseek_v32",
        {"index_head_dim": 20, "index_n_heads": 9, "index_topk": 8, "rope_parameters": {**YARN, "mscale_all_dim": 1.2}},
    ),
    "glm_moe_dsa with a choice for several layers": ("glm_moe_dsa", {"indexer_types": ["full", "shared", "full"]}),
    "glm_moe_dsa with kinds of layers": ("glm_moe_dsa", {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "hunyuan_v1_moe with stretched positions": (
        "hunyuan_v1_moe",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": 50.0, "factor": 1.0}},
    ),
    "granite_swa with one rotation": ("granite_swa", {"layer_rope_theta": None, "mlp_bias": True}),
    "granitemoe_swa without shared expert": ("granitemoe_swa", {"shared_intermediate_size": 0, "attention_bias": True}),
    "llama4 without norms and growth": (
        "llama4",
        {
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_bias": True,
            "no_rope_layers": [0, 1, 1, 0],
        },
    ),
    "deepseek_v4": ("deepseek_v4", {}),
    "glm5_next": ("glm5_next", {}),
    "mistral_large4": ("mistral_large4", {}),
    "mistral_large4 without a list": (
        "mistral_large4",
        {"no_rope_layers": None, "kv_source_layers": None, "indexer_types": None, "attention_bias": True},
    ),
    "mistral_large4 that sees all": ("mistral_large4", {"index_topk": 256, "rope_parameters": None}),
    "hy_v4": ("hy_v4", {}),
    "hy_v4 whose second layer chooses": ("hy_v4", {"indexer_types": None}),
    "inkling": ("inkling", {}),
    "inkling without growth": ("inkling", {"log_scaling_n_floor": None, "conv_kernel_size": 3, "n_shared_experts": 1}),
    "minimax_m3_vl": ("minimax_m3_vl", {}),
    "minimax_m3_vl with whole heads turning and no recent block": (
        "minimax_m3_vl",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "index_local_blocks": 0},
    ),
    "minimax_m3_vl that sees all": ("minimax_m3_vl", {"index_topk_blocks": 20}),
    "mixtral": ("mixtral", {}),
    "mixtral with a window": ("mixtral", {"sliding_window": 7, "tie_word_embeddings": True}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe with dense layers": ("qwen2_moe", {"decoder_sparse_step": 2, "norm_topk_prob": True, "qkv_bias": False}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe unnormalised": ("qwen3_moe", {"norm_topk_prob": False, "attention_bias": True, "mlp_only_layers": []}),
}
SHARED_PARTS = ("cohere2", "gpt2", "llama", "mistral", "phi3", "qwen2", "qwen3")
"""Families whose rotations, windows and heads are those of many others."""
PROMPT_LENGTHS = (1, 6, 38, 14)


def make_streams() -> list[Stream]:
    choose = random.Random(3)
    return [Stream([choose.randrange(3, 130) for _ in range(length)]) for length in PROMPT_LENGTHS]


def assert_same_as_oracle(oracle: Any, stream: Stream, share: float = 1e-5) -> None:
    """Logits of every token, and each generated token is the oracle's likeliest (or as likely)."""
    with torch.inference_mode():
        expected = oracle(torch.tensor([stream.token_ids[: stream.computed]])).logits[0]
    found = torch.stack(stream.logits)
    # float32 sums in another order, the oracle's in one that depends on the processor; the size of the logits is that
    # of the spread weights
    tolerance = share * float(expected.abs().max())
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
    behind = expected.max(dim=-1).values - expected.gather(1, found.argmax(-1, keepdim=True)).squeeze(1)
    assert behind.max() < 2 * tolerance


def is_quick(name: str, family: str, overrides: dict[str, Any]) -> bool:
    """Every family is run each time, as it is; with other settings, one for each kind of rotation and of window."""
    kinds = ("rope_parameters", "sliding_window", "layer_types", "tie_word_embeddings")
    return name == family or not overrides or (family in SHARED_PARTS and any(each in overrides for each in kinds))


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        pytest.param(family, overrides, id=name, marks=() if is_quick(name, family, overrides) else pytest.mark.long)
        for name, (family, overrides) in VARIANTS.items()
    ],
)
def test_prompts_and_greedy_text_agree(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    path = make_checkpoint(family, tmp_path, **overrides)
    run, streams = PagedRun(load(path)), make_streams()
    run.step([(stream, len(stream.token_ids)) for stream in streams])
    run.decode(streams, 5)  # beyond every window and every length that rotations are stretched from
    oracle = load_oracle(path)
    # random states and sharp scores amplify roundings: in float32 transformers is 6e-5, 5e-5, 2e-5, 7e-4 and 2e-4 off
    # itself in float64
    # float32 sums of Gemma 4 are up to 1.2e-5 apart where MKL has AVX-512
    shares = {"granitemoehybrid": 1e-4, "bailing_hybrid": 1e-4, "mamba2": 5e-5, "zamba2": 2e-3}
    shares |= {"mistral_large4": 2e-4, "gemma4": 2e-5}
    share = shares.get(family, 1e-5)
    if overrides.get("num_hidden_layers") == 12:
        share = 3e-4  # transformers is 8e-5 off itself in float64
    for stream in streams:
        assert_same_as_oracle(oracle, stream, share)


def test_short_factors_of_longrope_agree_where_no_sequence_is_longer(tmp_path: Path) -> None:
    path = make_checkpoint("phi3", tmp_path, rope_parameters=LONG, original_max_position_embeddings=38)
    run, streams = PagedRun(load(path, max_model_len=38)), make_streams()
    run.step([(stream, len(stream.token_ids)) for stream in streams])
    oracle = load_oracle(path)
    for stream in streams:
        assert_same_as_oracle(oracle, stream)


@pytest.mark.parametrize("family", ["llama", "mistral", "opt"])
def test_prompts_cut_in_chunks_beside_decoding_rows_agree(family: str, tmp_path: Path) -> None:
    path = make_checkpoint(family, tmp_path)
    run, streams = PagedRun(load(path)), make_streams()
    choose = random.Random(1)
    for _ in range(60):
        rows = []
        for stream in streams:
            if stream.computed == len(stream.token_ids):
                stream.token_ids.append(int(stream.logits[-1].argmax()))
            if choose.random() < 0.7:
                rows.append((stream, choose.randint(1, min(6, len(stream.token_ids) - stream.computed))))
        if rows:
            choose.shuffle(rows)
            run.step(rows)
    oracle = load_oracle(path)
    assert min(stream.computed for stream in streams) > 30
    for stream in streams:
        assert_same_as_oracle(oracle, stream)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_a_shared_prefix_read_from_anothers_blocks_agrees(family: str, tmp_path: Path) -> None:
    path = make_checkpoint(family, tmp_path)
    run, first = PagedRun(load(path)), make_streams()[2]
    run.step([(first, len(first.token_ids))])
    blocks = 5
    shared = blocks * BLOCK_SIZE
    second = Stream([*first.token_ids[:shared], 99, 7, 41], first.table[:blocks], shared, first.logits[:shared])
    run.step([(second, 3)])
    run.decode([first, second], 20)
    oracle = load_oracle(path)
    assert_same_as_oracle(oracle, first)
    assert_same_as_oracle(oracle, second)


@pytest.mark.parametrize(
    ("family", "overrides", "rewrite"),
    [
        ("llama", {}, to_old_layout),
        *(("llama", {"rope_parameters": rope}, to_old_layout) for rope in (LLAMA3, LINEAR, YARN)),
        *((family, {}, to_pytorch_archive) for family in ("llama", "gpt2")),
        ("llama", {}, partial(rename_tensors, old_prefix="model.", new_prefix="")),
        ("gpt2", {}, partial(rename_tensors, old_prefix="transformer.", new_prefix="")),
        ("opt", {}, partial(rename_tensors, old_prefix="model.decoder.", new_prefix="decoder.")),
    ],
)
def test_older_layouts_of_config_files_and_names_mean_the_same(
    family: str, overrides: dict[str, Any], rewrite: Callable[[Path], None], tmp_path: Path
) -> None:
    path = make_checkpoint(family, tmp_path, **overrides)
    oracle = load_oracle(path)
    rewrite(path)
    run, stream = PagedRun(load(path)), make_streams()[2]
    run.step([(stream, len(stream.token_ids))])
    assert_same_as_oracle(oracle, stream)


def test_the_words_of_sarvams_release_mean_the_same(tmp_path: Path) -> None:
    path = make_checkpoint("sarvam_mla", tmp_path, rope_parameters=SCALED_YARN)
    oracle = load_oracle(path)
    to_old_layout(path)
    scaling = {name: value for name, value in SCALED_YARN.items() if name not in ("rope_type", "rope_theta")}
    counts = {"num_experts": 8, "num_shared_experts": 1, "head_dim": 32}
    edit_config(
        path,
        remove=("n_routed_experts", "n_shared_experts"),
        rope_scaling={**scaling, "type": "deepseek_yarn"},
        **counts,
    )
    run, stream = PagedRun(load(path)), make_streams()[2]
    run.step([(stream, len(stream.token_ids))])
    assert_same_as_oracle(oracle, stream)


def test_sharded_files_load_as_one(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path, max_shard_size="20KB")
    assert len(list(path.glob("model-*.safetensors"))) > 2
    run, stream = PagedRun(load(path)), make_streams()[1]
    run.step([(stream, len(stream.token_ids))])
    assert_same_as_oracle(load_oracle(path), stream)


def test_a_mistral_config_without_the_key_has_the_first_releases_window(tmp_path: Path) -> None:
    path = make_checkpoint("mistral", tmp_path)
    edit_config(path, remove=("sliding_window",))
    assert load(path).config.windows == (4096, 4096)


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path, dtype="bfloat16")
    run, stream = PagedRun(load(path, torch.bfloat16)), make_streams()[2]
    run.step([(stream, len(stream.token_ids))])
    with torch.inference_mode():
        expected = load_oracle(path)(torch.tensor([stream.token_ids])).logits[0]
    found = torch.stack(stream.logits)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()
