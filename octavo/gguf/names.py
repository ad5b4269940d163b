"""Names of tensors in llama.cpp's architectures, and those of octavo's modules, from which follows how checkpoints in
the layout of Hugging Face call them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

OWN: Final = "octavo."
"""What the names of tensors begin with that are those of a model's modules, and not of its checkpoints."""
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
    "post_attention_norm": "attention_output_norm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "mlp_output_norm",
    **named("ffn_*", "mlp.*_proj"),
    "ffn_gate_inp": "mlp.gate",
    **named("ffn_*_exps", "mlp.experts.{}.*_proj"),
    **named("ffn_*_shexp", "mlp.shared_experts.*_proj"),
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "exp_probs_b": "mlp.gate.e_score_correction_bias!",
}
"""Names in a layer. With {} a tensor holds all experts, ! ends a name without suffix and _ one whose weight has none,
and / precedes the part of a stacked tensor that it is: every other row (even, odd), the first or second half of rows,
or those of a latent's heads (keys, values)."""
TOPS: Final[Mapping[str, str]] = {
    "token_embd": "embed_tokens",
    "position_embd": "embed_positions",
    "token_types": "embed_types",
    "token_embd_norm": "embed_norm",
    "output_norm": "norm",
    "output": "lm_head",
    "cls": "score.dense",
    "cls.norm": "score.norm",
    "cls.output": "score.classifier",
}
"""Names outside the layers. With {} each row of a tensor has a name, with its number."""
MLP_NORM: Final = {"post_attention_norm": "post_attention_layernorm"}
"""The norm of the MLP's input, which most files call `ffn_norm`."""
GEMMA3N: Final = {
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
MIXTRAL: Final = named("ffn_*_exps", "mlp.experts.{}.*", _NUMBERED)
MINIMAX: Final = {**MIXTRAL, "exp_probs_b": "mlp.e_score_correction_bias!"}
LING: Final = {"exp_probs_b": "mlp.gate.expert_bias!"}
GRANITE: Final = {
    "ffn_gate_exps": "block_sparse_moe.input_linear/first",
    "ffn_up_exps": "block_sparse_moe.input_linear/second",
    "ffn_down_exps": "block_sparse_moe.output_linear",
    "ffn_gate_shexp": "shared_mlp.input_linear/first",
    "ffn_up_shexp": "shared_mlp.input_linear/second",
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
_JOINED_IN_MLP: Final = named("*", "mlp.*", _JOINED_EXPERTS)
MISTRAL4: Final = {**LATENT, **_JOINED_IN_MLP}
SINKS: Final = {"attn_sinks": "self_attn.sinks!"}
GRANITE_SWA: Final = {**SINKS, **_JOINED_IN_MLP, "ffn_up_shexp": "shared_mlp.input_linear"}
DBRX: Final = {
    "attn_output_norm": "post_attention_layernorm",
    **named("ffn_*_exps", "mlp.experts.{}.*", {"gate": "w1", "up": "v1", "down": "w2"}),
}
BITNET: Final = {"attn_sub_norm": "self_attn.attn_sub_norm", "ffn_sub_norm": "mlp.ffn_sub_norm"}
CHATGLM: Final = {**FUSED, "attn_qkv": "self_attn.q_proj"}
ERNIE_MOE: Final = {"exp_probs_b": "mlp.moe_statics.e_score_correction_bias!"}
EXPERT_BIAS: Final = {"exp_probs_b": "mlp.expert_bias!"}
AFMOE: Final = {**EXPERT_BIAS, "attn_gate": "self_attn.gate_proj"}
EXAONE_MOE: Final = {"exp_probs_b": "mlp.e_score_correction_bias!"}
STEP35: Final = {
    "attn_gate": "self_attn.g_proj",
    "exp_probs_b": "mlp.router_bias!",
    **named("ffn_*_exps", "mlp.experts.*_proj"),
}
APERTUS_NUMBERS: Final[Mapping[str, tuple[str, tuple[int, ...]]]] = {
    **{f"xielu.{each}": (f"mlp.act_fn.{each}", (1,)) for each in ("alpha_n", "alpha_p")},
    **{f"xielu.{each}": (f"mlp.act_fn.{each}", ()) for each in ("beta", "eps")},
}
GROUPED: Final = {"attn_qkv": "self_attn.query_key_value"}
FALCON_NORMS: Final = {**GROUPED, "attn_norm": "post_attention_layernorm", "attn_norm_2": "input_layernorm"}
MPT: Final = {"attn_qkv": "self_attn.Wqkv"}
_SCAN: Final = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_x": "x_proj",
    "ssm_dt": "dt_proj",
    "ssm_a": "A!",
    "ssm_d": "D!",
    "ssm_out": "out_proj",
}
MAMBA: Final = named("*", "mixer.*", _SCAN)
JAMBA: Final = {
    **named("*", "mamba.*", _SCAN),
    **named("ssm_*_norm", "mamba.*_layernorm", ("dt", "b", "c")),
}
_SCAN2: Final = {**_SCAN, "ssm_a": "A_log!", "ssm_dt": "dt_bias!", "ssm_norm": "norm"}
MAMBA2: Final = named("*", "mixer.*", _SCAN2)
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
MAMBA_BESIDE: Final = named("*", "mamba.*", _SCAN2)
FALCON_H1: Final = {
    **MAMBA_BESIDE,
    "ffn_norm": "pre_ff_layernorm",
    **named("ffn_*", "feed_forward.*_proj"),
}
GRANITE_HYBRID: Final = {
    **MAMBA_BESIDE,
    **GRANITE,
    "ffn_gate": "shared_mlp.input_linear/first",
    "ffn_up": "shared_mlp.input_linear/second",
}
LFM2: Final = {
    **named("shortconv.*", "conv.*", ("conv", "in_proj", "out_proj")),
    **named("ffn_*", "mlp.*", _NUMBERED),
    **named("ffn_*_exps", "mlp.experts.{}.*", _NUMBERED),
    "exp_probs_b": "mlp.expert_bias!",
}
LFM2_TOPS: Final = {"token_embd_norm": "norm"}
KIMI_LINEAR: Final = {
    **LATENT,
    **named("ssm_conv1d_*", "self_attn.*_conv1d", "qkv"),
    **named("ssm_*", "self_attn.*_proj", ("f_a", "f_b", "g_a", "g_b")),
    "ssm_beta": "self_attn.b_proj",
    "ssm_dt": "self_attn.dt_bias!",
    "ssm_a": "self_attn.A_log!",
    "ssm_norm": "self_attn.o_norm",
    **MIXTRAL,
}
QWEN35: Final = {
    **MLP_NORM,
    **named("*", "linear_attn.*", _SCAN2),
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_ba": "linear_attn.in_proj_b",
}
GPT_OSS: Final = {
    **MLP_NORM,
    **SINKS,
    "ffn_gate_exps": "mlp.experts.gate_up_proj_/even",
    "ffn_up_exps": "mlp.experts.gate_up_proj_/odd",
    "ffn_down_exps": "mlp.experts.down_proj_",
}
ENCODER: Final = {"attn_output_norm": "input_layernorm", "layer_output_norm": "post_attention_layernorm"}
BERT: Final = {**ENCODER, **named("attn_*", "self_attn.*", {"q": "query", "k": "key", "v": "value"})}
DISTIL_BERT: Final = {**ENCODER, **named("attn_*", "self_attn.*_lin", "qkv")}
JINA_BERT: Final = {**BERT, **FUSED}
JINA_BERT_HALVES: Final = {
    **BERT,
    "ffn_gate": "mlp.gate_up_proj/first",
    "ffn_up": "mlp.gate_up_proj/second",
}
NOMIC_MOE: Final = {
    **ENCODER,
    "ffn_up_exps": "mlp.experts.{}.w1",
    "ffn_down_exps": "mlp.experts.{}.w2",
}
