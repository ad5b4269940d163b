"""Names of tensors in llama.cpp's architectures, and those that the layout of Hugging Face has for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

GATED: Final = ("gate", "up", "down")
_NUMBERED: Final = {"gate": "w1", "down": "w2", "up": "w3"}


def named(theirs: str, ours: str, parts: Iterable[str] | Mapping[str, str] = GATED) -> dict[str, str]:
    """Return a name for each part, which stands in the place of `*`; parts may have other names in our layout."""
    own = parts if isinstance(parts, Mapping) else {part: part for part in parts}
    return {theirs.replace("*", part): ours.replace("*", name) for part, name in own.items()}


LAYER: Final[Mapping[str, str]] = {
    "attn_norm": "input_layernorm",
    **named("attn_*", "self_attn.*_proj", ("q", "k", "v", "qkv")),
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    **named("ffn_*", "mlp.*_proj"),
    "ffn_gate_inp": "mlp.gate",
    **named("ffn_*_exps", "mlp.experts.{}.*_proj"),
    **named("ffn_*_shexp", "mlp.shared_experts.*_proj"),
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
    **named("ffn_*_shexp", "mlp.shared_expert.*_proj"),
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
MIXTRAL: Final = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    **named("ffn_*_exps", "block_sparse_moe.experts.{}.*", _NUMBERED),
}
MINIMAX: Final = {**MIXTRAL, "exp_probs_b": "block_sparse_moe.e_score_correction_bias!"}
HUNYUAN: Final = {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
    "ffn_gate_inp": "mlp.gate.wg",
    **named("ffn_*_shexp", "mlp.shared_mlp.*_proj"),
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
    **named("attn_*", "self_attn.*_proj", ("q_a", "q_b", "kv_b")),
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_k_b": "self_attn.kv_b_proj/keys",
    "attn_v_b": "self_attn.kv_b_proj/values",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
}
GLM_DSA: Final = {
    **LATENT,
    **named("indexer.*", "self_attn.indexer.*", {"attn_q_b": "wq_b", "attn_k": "wk", "proj": "weights_proj"}),
    "indexer.k_norm": "self_attn.indexer.k_norm",
}
_JOINED_EXPERTS: Final = {
    "ffn_gate_up_exps": "experts.gate_up_proj_",
    "ffn_gate_exps": "experts.gate_up_proj_/first",
    "ffn_up_exps": "experts.gate_up_proj_/second",
    "ffn_down_exps": "experts.down_proj_",
}
GEMMA4: Final = {
    **GEMMA_NAMES,
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale": "layer_scalar!",
    **named("post_ffw_norm_*", "post_feedforward_layernorm_*", "12"),
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale!",
    **_JOINED_EXPERTS,
    "ffn_down_exps.scale": "router.per_expert_scale!",
}
LLAMA4: Final = {
    **named("ffn_*", "feed_forward.*_proj"),
    "ffn_gate_inp": "feed_forward.router",
    **named("ffn_*_exps", "feed_forward.experts.{}.*_proj"),
    **named("ffn_*_shexp", "feed_forward.shared_expert.*_proj"),
}
MISTRAL4: Final = {**LATENT, **named("*", "mlp.*", _JOINED_EXPERTS)}
GRANITE_SWA: Final = {
    "attn_sinks": "self_attn.sinks!",
    "ffn_gate_inp": "block_sparse_moe.router",
    **named("*", "block_sparse_moe.*", _JOINED_EXPERTS),
    "ffn_up_shexp": "shared_mlp.input_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
DBRX: Final = {
    "attn_norm": "norm_attn_norm.norm_1",
    "attn_qkv": "norm_attn_norm.attn.Wqkv",
    "attn_output": "norm_attn_norm.attn.out_proj",
    "attn_output_norm": "norm_attn_norm.norm_2",
    "ffn_gate_inp": "ffn.router.layer",
    **named("ffn_*_exps", "ffn.experts.mlp.{}.*", {"gate": "w1", "up": "v1", "down": "w2"}),
}
BITNET: Final = {"attn_sub_norm": "self_attn.attn_sub_norm", "ffn_sub_norm": "mlp.ffn_sub_norm"}
CHATGLM: Final = {**FUSED, "attn_qkv": "self_attn.q_proj"}
ERNIE_MOE: Final = {"exp_probs_b": "mlp.moe_statics.e_score_correction_bias!"}
AFMOE: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_mlp_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "attn_gate": "self_attn.gate_proj",
    "ffn_gate_inp": "mlp.router.gate",
    "exp_probs_b": "mlp.expert_bias!",
}
EXAONE_MOE: Final = {"exp_probs_b": "mlp.e_score_correction_bias!"}
MIMO2: Final = {"attn_sinks": "self_attn.attention_sink_bias!"}
STEP35: Final = {
    "attn_gate": "self_attn.g_proj",
    "ffn_gate_inp": "moe.gate",
    "exp_probs_b": "moe.router_bias!",
    **named("ffn_*_exps", "moe.*_proj"),
    **named("ffn_*_shexp", "share_expert.*_proj"),
}
HY_V3: Final = {
    "ffn_gate_inp": "mlp.router.gate",
    "exp_probs_b": "mlp.expert_bias!",
    **named("ffn_*_shexp", "mlp.shared_mlp.*_proj"),
}
APERTUS: Final = {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}
APERTUS_NUMBERS: Final[Mapping[str, tuple[str, tuple[int, ...]]]] = {
    **{f"xielu.{each}": (f"mlp.act_fn.{each}", (1,)) for each in ("alpha_n", "alpha_p")},
    **{f"xielu.{each}": (f"mlp.act_fn.{each}", ()) for each in ("beta", "eps")},
}
_WIDER: Final = {"ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"}
FALCON: Final = {"attn_qkv": "self_attention.query_key_value", "attn_output": "self_attention.dense", **_WIDER}
FALCON_NORMS: Final = {**FALCON, "attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}
FALCON_TOPS: Final = {"token_embd": "word_embeddings", "output_norm": "ln_f"}
NEOX: Final = {"attn_qkv": "attention.query_key_value", "attn_output": "attention.dense", **_WIDER}
NEOX_TOPS: Final = {"token_embd": "embed_in", "output_norm": "final_layer_norm", "output": "embed_out"}
BLOOM_TOPS: Final = {**FALCON_TOPS, "token_embd_norm": "word_embeddings_layernorm"}
GPT2: Final = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
GPT2_TOPS: Final = {"token_embd": "wte", "position_embd": "wpe", "output_norm": "ln_f"}
MPT: Final = {
    "attn_norm": "norm_1",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.out_proj",
    "ffn_norm": "norm_2",
    "ffn_up": "ffn.up_proj",
    "ffn_down": "ffn.down_proj",
}
MPT_TOPS: Final = {"token_embd": "wte", "output_norm": "norm_f"}
PHI: Final = {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
PHI_TOPS: Final = {"output_norm": "final_layernorm"}
_SCAN: Final = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_x": "x_proj",
    "ssm_dt": "dt_proj",
    "ssm_a": "A!",
    "ssm_d": "D!",
    "ssm_out": "out_proj",
}
MAMBA: Final = {"attn_norm": "norm", **named("*", "mixer.*", _SCAN)}
MAMBA_TOPS: Final = {"token_embd": "embeddings", "output_norm": "norm_f"}
JAMBA: Final = {
    **named("*", "mamba.*", _SCAN),
    **named("ssm_*_norm", "mamba.*_layernorm", ("dt", "b", "c")),
    "ffn_norm": "pre_ff_layernorm",
    **named("ffn_*", "feed_forward.*_proj"),
    "ffn_gate_inp": "feed_forward.router",
    **named("ffn_*_exps", "feed_forward.experts.{}.*_proj"),
}
JAMBA_TOPS: Final = {"output_norm": "final_layernorm"}
_SCAN2: Final = {**_SCAN, "ssm_a": "A_log!", "ssm_dt": "dt_bias!", "ssm_norm": "norm"}
MAMBA2: Final = {"attn_norm": "norm", **named("*", "mixer.*", _SCAN2)}
NEMOTRON_H: Final = {
    **MAMBA2,
    **named("attn_*", "mixer.*_proj", ("q", "k", "v")),
    "attn_output": "mixer.o_proj",
    **named("ffn_*", "mixer.*_proj", ("up", "down")),
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b": "mixer.gate.e_score_correction_bias!",
    **named("ffn_*_exps", "mixer.experts.{}.*_proj", ("up", "down")),
    **named("ffn_*_shexp", "mixer.shared_experts.*_proj", ("up", "down")),
    **named("ffn_latent_*", "mixer.*_latent_proj", {"down": "fc1", "up": "fc2"}),
}
_MAMBA_BESIDE: Final = named("*", "mamba.*", _SCAN2)
FALCON_H1: Final = {
    **_MAMBA_BESIDE,
    "ffn_norm": "pre_ff_layernorm",
    **named("ffn_*", "feed_forward.*_proj"),
}
GRANITE_HYBRID: Final = {
    **_MAMBA_BESIDE,
    **GRANITE,
    "ffn_gate": "shared_mlp.input_linear/first",
    "ffn_up": "shared_mlp.input_linear/second",
    "ffn_down": "shared_mlp.output_linear",
}
LFM2: Final = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    **named("shortconv.*", "conv.*", ("conv", "in_proj", "out_proj")),
    "attn_output": "self_attn.out_proj",
    **named("attn_*_norm", "self_attn.*_layernorm", ("q", "k")),
    **named("ffn_*", "feed_forward.*", _NUMBERED),
    "ffn_gate_inp": "feed_forward.gate",
    **named("ffn_*_exps", "feed_forward.experts.{}.*", _NUMBERED),
    "exp_probs_b": "feed_forward.expert_bias!",
}
LFM2_TOPS: Final = {"token_embd_norm": "embedding_norm", "output_norm": "embedding_norm"}
KIMI_LINEAR: Final = {
    **LATENT,
    **named("ssm_conv1d_*", "self_attn.*_conv1d", "qkv"),
    **named("ssm_*", "self_attn.*_proj", ("f_a", "f_b", "g_a", "g_b")),
    "ssm_beta": "self_attn.b_proj",
    "ssm_dt": "self_attn.dt_bias!",
    "ssm_a": "self_attn.A_log!",
    "ssm_norm": "self_attn.o_norm",
    **named("ffn_*_exps", "mlp.experts.{}.*", _NUMBERED),
}
QWEN35: Final = {
    **SHARED,
    **named("*", "linear_attn.*", _SCAN2),
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_ba": "linear_attn.in_proj_b",
}
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
_BERT_LAYER: Final = {
    **named("attn_*", "attention.self.*", {"q": "query", "k": "key", "v": "value"}),
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
}
BERT: Final = {
    **_BERT_LAYER,
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
_HEAD_TOPS: Final = {"cls": "classifier.dense", "cls.output": "classifier.out_proj"}
BERT_TOPS: Final = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    **_HEAD_TOPS,
}
DISTIL_BERT: Final = {
    **named("attn_*", "attention.*_lin", "qkv"),
    "attn_output": "attention.out_lin",
    "attn_output_norm": "sa_layer_norm",
    "ffn_up": "ffn.lin1",
    "ffn_down": "ffn.lin2",
    "layer_output_norm": "output_layer_norm",
}
DISTIL_BERT_TOPS: Final = {**BERT_TOPS, "cls": "pre_classifier", "cls.output": "classifier"}
JINA_BERT: Final = {
    **_BERT_LAYER,
    "ffn_up": "mlp.gated_layers",
    "ffn_down": "mlp.wo",
    "layer_output_norm": "mlp.layernorm",
}
JINA_BERT_HALVES: Final = {
    **JINA_BERT,
    "ffn_gate": "mlp.gated_layers/first",
    "ffn_up": "mlp.gated_layers/second",
}
_FLASH_NORMS: Final = {"attn_output_norm": "norm1", "layer_output_norm": "norm2"}
FLASH: Final = {
    **_FLASH_NORMS,
    "attn_qkv": "mixer.Wqkv",
    "attn_output": "mixer.out_proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
FLASH_TOPS: Final = {**BERT_TOPS, "token_embd_norm": "emb_ln"}
NOMIC: Final = {
    **_FLASH_NORMS,
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.out_proj",
    "ffn_up": "mlp.fc11",
    "ffn_gate": "mlp.fc12",
    "ffn_down": "mlp.fc2",
}
NOMIC_MOE: Final = {
    **NOMIC,
    "ffn_up": "mlp.fc1",
    "ffn_gate_inp": "mlp.router.layer",
    "ffn_up_exps": "mlp.experts.mlp.{}.w1",
    "ffn_down_exps": "mlp.experts.mlp.{}.w2",
}
MODERN_BERT: Final = {
    "attn_norm": "attn_norm",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.Wo",
    "ffn_norm": "mlp_norm",
    "ffn_up": "mlp.Wi",
    "ffn_down": "mlp.Wo",
}
MODERN_BERT_TOPS: Final = {
    "token_embd": "embeddings.tok_embeddings",
    "token_embd_norm": "embeddings.norm",
    "output_norm": "final_norm",
    "cls": "head.dense",
    "cls.norm": "head.norm",
    "cls.output": "classifier",
}
