"""Names of tensors in llama.cpp's architectures, and those that the layout of Hugging Face has for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

LAYER: Final[Mapping[str, str]] = {
    "attn_norm": "input_layernorm",
    **{f"attn_{each}": f"self_attn.{each}_proj" for each in ("q", "k", "v", "qkv")},
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    **{f"ffn_{each}": f"mlp.{each}_proj" for each in ("gate", "up", "down")},
    "ffn_gate_inp": "mlp.gate",
    **{f"ffn_{each}_exps": f"mlp.experts.{{}}.{each}_proj" for each in ("gate", "up", "down")},
    **{f"ffn_{each}_shexp": f"mlp.shared_experts.{each}_proj" for each in ("gate", "up", "down")},
    "exp_probs_b": "mlp.gate.e_score_correction_bias!",
}
"""Names in a layer. With {} a tensor holds all experts, ! ends a name without suffix and _ one whose weight has none,
and / precedes the part of a stacked tensor that it is: every other row (even, odd), the first or second half of rows,
or those of a latent's heads (keys, values)."""
AFTER: Final = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
GEMMA_NAMES: Final = {**AFTER, "ffn_norm": "pre_feedforward_layernorm"}
GEMMA3N: Final = {
    **GEMMA_NAMES,
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale": "altup.correct_output_scale!",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
GEMMA3N_TOPS: Final = {
    "per_layer_token_embd": "embed_tokens_per_layer",
    "per_layer_model_proj": "per_layer_model_projection",
    "per_layer_proj_norm": "per_layer_projection_norm",
    "altup_proj": "altup_projections.{}",
    "altup_unembd_proj": "altup_unembed_projections.{}",
}
FUSED: Final = {"ffn_up": "mlp.gate_up_proj"}
SHARED: Final = {
    **{f"ffn_{each}_shexp": f"mlp.shared_expert.{each}_proj" for each in ("gate", "up", "down")},
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
MIXTRAL: Final = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    **{
        f"ffn_{each}_exps": f"block_sparse_moe.experts.{{}}.w{number}"
        for number, each in enumerate(("gate", "down", "up"), start=1)
    },
}
MINIMAX: Final = {**MIXTRAL, "exp_probs_b": "block_sparse_moe.e_score_correction_bias!"}
HUNYUAN: Final = {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
    "ffn_gate_inp": "mlp.gate.wg",
    **{f"ffn_{each}_shexp": f"mlp.shared_mlp.{each}_proj" for each in ("gate", "up", "down")},
}
LING: Final = {
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
    "attn_q_norm": "attention.query_layernorm",
    "attn_k_norm": "attention.key_layernorm",
    "exp_probs_b": "mlp.gate.expert_bias!",
}
LING_TOPS: Final = {"token_embd": "word_embeddings"}
GRANITE: Final = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": "block_sparse_moe.input_linear/first",
    "ffn_up_exps": "block_sparse_moe.input_linear/second",
    "ffn_down_exps": "block_sparse_moe.output_linear",
    "ffn_gate_shexp": "shared_mlp.input_linear/first",
    "ffn_up_shexp": "shared_mlp.input_linear/second",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
LATENT: Final = {
    **{f"attn_{each}": f"self_attn.{each}_proj" for each in ("q_a", "q_b", "kv_b")},
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_k_b": "self_attn.kv_b_proj/keys",
    "attn_v_b": "self_attn.kv_b_proj/values",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
}
_SCAN: Final = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_x": "x_proj",
    "ssm_dt": "dt_proj",
    "ssm_a": "A!",
    "ssm_d": "D!",
    "ssm_out": "out_proj",
}
MAMBA: Final = {"attn_norm": "norm", **{name: f"mixer.{own}" for name, own in _SCAN.items()}}
MAMBA_TOPS: Final = {"token_embd": "embeddings", "output_norm": "norm_f"}
JAMBA: Final = {
    **{name: f"mamba.{own}" for name, own in _SCAN.items()},
    **{f"ssm_{each}_norm": f"mamba.{each}_layernorm" for each in ("dt", "b", "c")},
    "ffn_norm": "pre_ff_layernorm",
    **{f"ffn_{each}": f"feed_forward.{each}_proj" for each in ("gate", "up", "down")},
    "ffn_gate_inp": "feed_forward.router",
    **{f"ffn_{each}_exps": f"feed_forward.experts.{{}}.{each}_proj" for each in ("gate", "up", "down")},
}
JAMBA_TOPS: Final = {"output_norm": "final_layernorm"}
GPT_OSS: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": "self_attn.sinks!",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate_up_proj_/even",
    "ffn_up_exps": "mlp.experts.gate_up_proj_/odd",
    "ffn_down_exps": "mlp.experts.down_proj_",
}
STABLELM: Final = {"attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm"}
STARCODER: Final = {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
GLM4: Final = {
    **FUSED,
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
