"""llama.cpp's architectures in the layout of Hugging Face: for each a class, keys of its config, names in a layer.

An architecture is a line of `ARCHITECTURES`. Names of metadata and tensors are those of gguf-py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, Final

from octavo.errors import UnsupportedModel
from octavo.gguf import names
from octavo.gguf.metadata import Metadata
from octavo.gguf.reader import Array

Make = Callable[[Metadata, dict[str, Any]], Mapping[str, Any]]
"""Returns what an architecture's config has beyond the common keys, which are given."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One of llama.cpp's architectures."""

    family: str
    """The class of transformers."""
    make: Make
    names: Mapping[str, str]
    """Names in a layer that differ from the usual ones."""
    is_permuted: bool = False
    """The converter has put the rows of queries and keys in pairs."""
    shift: float = 0.0
    """What it has added to weights of norms."""
    tops: Mapping[str, str] = field(default_factory=dict)
    """Names beside the layers; with {} a tensor holds those of all numbers."""
    has_states: bool = False
    """Layers without attention keep states; metadata count no heads there, and no MLP where none has one."""


def architecture_of(meta: Metadata) -> Architecture:
    """Return the architecture of a file. Raises UnsupportedModel, with the names of those that are there."""
    name = meta.architecture
    if name == "llama" and meta.values.get("expert_count"):
        name = "llama (experts)"
    if name == "deepseek2" and meta.values.get("expert_gating_func", 1) == 2:
        name = "deepseek2 (sigmoid)"
    if name == "granitemoe" and meta.values.get("expert_shared_feed_forward_length"):
        name = "granitemoe (shared)"
    if name == "mamba" and meta.bool("ssm.dt_b_c_rms", False):
        name = "mamba (norms)"
    if name == "olmo2" and "attention.sliding_window" in meta.values:
        name = "olmo2 (windows)"
    if name not in ARCHITECTURES:
        known = ", ".join(dict.fromkeys(each.partition(" ")[0] for each in ARCHITECTURES))
        raise UnsupportedModel(
            f"{meta.where}: general.architecture is {meta.architecture!r}, expected one of {known}; a checkpoint in "
            "Hugging Face layout of such a model may be read"
        )
    return ARCHITECTURES[name]


def _common(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    return {}


def _partial(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    turned = meta.positive("rope.dimension_count", base["head_dim"])
    return {"partial_rotary_factor": turned / base["head_dim"]}


def _mixture(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    experts = meta.positive("expert_count")
    return {
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), experts),
        "num_experts_per_tok": meta.positive("expert_used_count"),
        "moe_intermediate_size": meta.positive("expert_feed_forward_length", base["intermediate_size"]),
    }


def _qwen2moe(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    width = meta.positive("expert_shared_feed_forward_length", base["intermediate_size"])
    return {**_mixture(meta, base), "norm_topk_prob": False, "shared_expert_intermediate_size": width}


def _qwen3moe(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    return {**_mixture(meta, base), "norm_topk_prob": True}


def _sections(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    """Positions in time, height and width turn pairs of their own."""
    value = meta.values.get("rope.dimension_sections")
    if not isinstance(value, Array):
        raise meta.error("rope.dimension_sections", "pairs for each of three positions")
    model_type = "qwen2_vl_text" if meta.architecture == "qwen2vl" else "qwen3_vl_text"
    scaling = {"rope_type": "default", **(base["rope_scaling"] or {}), "mrope_section": value.values()[:3]}
    return {"model_type": model_type, "rope_scaling": scaling}


def _sections_moe(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    return {**_qwen3moe(meta, base), **_sections(meta, base)}


def _gemma(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    return {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}


def _gemma2(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    # the largest of these models scale scores by an even share of the width
    is_largest = base["num_hidden_layers"] == (46 if meta.architecture == "gemma2" else 62)
    scalar = base["hidden_size"] // base["num_attention_heads"] if is_largest else base["head_dim"]
    own = {"model_type": "gemma2", "query_pre_attn_scalar": scalar, "sliding_window": base["sliding_window"] or 4096}
    return {
        **_gemma(meta, base),
        **own,
        "attn_logit_softcapping": meta.values.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": meta.values.get("final_logit_softcapping", 30.0),
    }


def _gemma3(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    cap, local = meta.values.get("final_logit_softcapping"), meta.positive_float("rope.freq_base_swa", 10_000.0)
    own = {"model_type": "gemma3_text", "attn_logit_softcapping": None, "final_logit_softcapping": cap}
    return {**_gemma2(meta, base), **own, "rope_local_base_freq": local}


def _gemma3n(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    named = ("attention.sliding_window_pattern", "activation_sparsity_scale")
    windows, cuts = (each.values() if isinstance(each := meta.values.get(name), Array) else None for name in named)
    sizes = {name: next(iter(tensor.shape), None) for name, tensor in meta.types.items()}
    # the file has the number of standard deviations in the place of the share that lies below it
    shares = cuts and [round(NormalDist().cdf(each), 6) if isinstance(each, float) else each for each in cuts]
    return {
        **_gemma3(meta, base),
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


def _phi3(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    return {
        **_partial(meta, base),
        "original_max_position_embeddings": meta.values.get("rope.scaling.original_context_length"),
    }


def _mistral3(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    scaling = base["rope_scaling"]
    if scaling is None:
        return {}
    share = meta.float("rope.scaling.yarn_log_multiplier", 1.0)
    scaling = {**scaling, "mscale": share, "mscale_all_dim": share}
    if "attention.temperature_scale" in meta.values:
        scaling["llama_4_scaling_beta"] = meta.float("attention.temperature_scale")
    return {"rope_scaling": scaling}


def _granite(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    return {
        "attention_multiplier": meta.float("attention.scale", base["head_dim"] ** -0.5),
        "embedding_multiplier": meta.float("embedding_scale", 1.0),
        "residual_multiplier": meta.float("residual_scale", 1.0),
        "logits_scaling": meta.positive_float("logit_scale", 1.0),
    }


def _granite_moe(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    shared = meta.optional_int("expert_shared_feed_forward_length") or None
    own = {**_granite(meta, base), **_mixture(meta, base)}
    return {**own, "shared_intermediate_size": shared}


def _deepseek(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    rank, turned = meta.positive("attention.kv_lora_rank"), meta.positive("rope.dimension_count")
    key = meta.positive("attention.key_length_mla", meta.positive("attention.key_length"))
    groups = meta.optional_int("expert_group_count") or 1
    scaling = base["rope_scaling"]
    if scaling is not None and "rope.scaling.yarn_log_multiplier" in meta.values:
        share = meta.float("rope.scaling.yarn_log_multiplier") * 10
        scaling = {**scaling, "mscale": share, "mscale_all_dim": share}
    own = {
        "kv_lora_rank": rank,
        "q_lora_rank": meta.optional_positive("attention.q_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": key - turned,
        "v_head_dim": meta.positive("attention.value_length_mla", meta.positive("attention.value_length")),
        "n_shared_experts": meta.optional_int("expert_shared_count") or None,
        "first_k_dense_replace": meta.optional_int("leading_dense_block_count") or 0,
        "routed_scaling_factor": meta.positive_float("expert_weights_scale", 1.0),
        "norm_topk_prob": meta.bool("expert_weights_norm", False),
        "n_group": groups,
        "topk_group": meta.optional_int("expert_group_used_count") or 1,
        "rope_scaling": scaling,
    }
    if meta.values.get("expert_gating_func", 1) != 2:
        own["topk_method"] = "group_limited_greedy" if groups > 1 else "greedy"
    return {**_mixture(meta, base), **own}


def _minimax(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    mixture = _mixture(meta, base)
    return {**_partial(meta, base), **mixture, "intermediate_size": mixture["moe_intermediate_size"]}


def _hunyuan_moe(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    shared = meta.optional_int("expert_shared_count") or 1
    return {**_mixture(meta, base), "moe_topk": meta.positive("expert_used_count"), "num_shared_expert": shared}


def _gpt_oss(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    width = meta.positive("expert_feed_forward_length", base["intermediate_size"])
    scaling = base["rope_scaling"] and {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, **base["rope_scaling"]}
    return {**_mixture(meta, base), "model_type": "gpt_oss", "intermediate_size": width, "rope_scaling": scaling}


def _stablelm(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    own = {"use_qkv_bias": base["attention_bias"], "qk_layernorm": meta.has("attn_q_norm.weight")}
    return {**_partial(meta, base), **own, "use_parallel_residual": meta.bool("use_parallel_residual", False)}


def _starcoder2(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    return {"use_bias": base["attention_bias"], "hidden_act": "gelu_pytorch_tanh", "sliding_window": None}


def _cohere(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    return {"logit_scale": meta.float("logit_scale", 0.0625), "use_qk_norm": meta.has("attn_q_norm.weight")}


def _glm4moe(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    own = {"use_qk_norm": meta.has("attn_q_norm.weight"), "n_shared_experts": meta.optional_int("expert_shared_count")}
    return {
        **_partial(meta, base),
        **_mixture(meta, base),
        **own,
        "first_k_dense_replace": meta.optional_int("leading_dense_block_count") or 0,
        "routed_scaling_factor": meta.positive_float("expert_weights_scale", 1.0),
        "norm_topk_prob": meta.bool("expert_weights_norm", True),
        "n_group": meta.optional_int("expert_group_count") or 1,
        "topk_group": meta.optional_int("expert_group_used_count") or 1,
    }


def _deepseek_moe(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    return {**_glm4moe(meta, base), "norm_topk_prob": meta.bool("expert_weights_norm", False)}


def _ling(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    return {**_glm4moe(meta, base), "num_shared_experts": meta.optional_int("expert_shared_count")}


def _minicpm(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    if "embedding_scale" in meta.values:
        return _granite(meta, base)
    # what files of the first converter leave out
    factors = {"embedding_multiplier": 12.0, "logits_scaling": base["hidden_size"] / 256}
    return {**_granite(meta, base), **factors, "residual_multiplier": 1.4 / base["num_hidden_layers"] ** 0.5}


def _olmo(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    return {"clip_qkv": meta.values.get("attention.clamp_kqv") or None}


def _phimoe(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    return {**_mixture(meta, base), **_phi3(meta, base), "lm_head_bias": "output.bias" in meta.types}


def _ernie(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    return {"use_bias": base["attention_bias"]}


def _nemotron(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    return {**_partial(meta, base), "hidden_act": "relu2"}


def _mamba(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    return {
        "state_size": meta.positive("ssm.state_size"),
        "conv_kernel": meta.positive("ssm.conv_kernel"),
        "intermediate_size": meta.positive("ssm.inner_size"),
        "time_step_rank": meta.positive("ssm.time_step_rank"),
        "layer_norm_epsilon": base["rms_norm_eps"],
        "use_bias": meta.has("ssm_in.bias"),
        "use_conv_bias": meta.has("ssm_conv1d.bias"),
    }


def _jamba(meta: Metadata, base: dict[str, Any]) -> Mapping[str, Any]:
    inner, hidden = meta.positive("ssm.inner_size"), base["hidden_size"]
    if inner % hidden:
        raise meta.error("ssm.inner_size", f"a multiple of embedding_length, which is {hidden}")
    return {
        **(_mixture(meta, base) if meta.optional_int("expert_count") else {"num_experts": 1}),
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


ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture("LlamaForCausalLM", _common, {}, is_permuted=True),
    "llama (experts)": Architecture("MixtralForCausalLM", _mixture, names.MIXTRAL, is_permuted=True),
    "arcee": Architecture("ArceeForCausalLM", lambda *_: {"hidden_act": "relu2"}, {}, is_permuted=True),
    "bailingmoe": Architecture("DeepseekForCausalLM", _deepseek_moe, {}, is_permuted=True),
    "bailingmoe2": Architecture("BailingMoeV2ForCausalLM", _ling, names.LING, tops=names.LING_TOPS),
    "deepseek": Architecture("DeepseekForCausalLM", _deepseek_moe, {}, is_permuted=True),
    "dots1": Architecture("Dots1ForCausalLM", _glm4moe, {}),
    "exaone": Architecture("LlamaForCausalLM", _common, {}),
    "internlm2": Architecture("LlamaForCausalLM", _common, {}, is_permuted=True),
    "minicpm": Architecture("GraniteForCausalLM", _minicpm, {}, is_permuted=True),
    "orion": Architecture("OrionForCausalLM", _partial, {}),
    "olmo": Architecture("OlmoForCausalLM", _olmo, {}, is_permuted=True),
    "phimoe": Architecture("PhimoeForCausalLM", _phimoe, names.MIXTRAL),
    "qwen2": Architecture("Qwen2ForCausalLM", _common, {}),
    "qwen2vl": Architecture("Qwen2ForCausalLM", _sections, {}),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", _qwen2moe, names.SHARED),
    "qwen3": Architecture("Qwen3ForCausalLM", _common, {}),
    "qwen3vl": Architecture("Qwen3ForCausalLM", _sections, {}),
    "qwen3vlmoe": Architecture("Qwen3MoeForCausalLM", _sections_moe, {}),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", _qwen3moe, {}),
    "gemma": Architecture("GemmaForCausalLM", _gemma, {}, shift=1.0),
    "gemma2": Architecture("Gemma2ForCausalLM", _gemma2, names.GEMMA_NAMES, shift=1.0),
    "gemma3": Architecture("Gemma3ForCausalLM", _gemma3, names.GEMMA_NAMES, shift=1.0),
    "gemma3n": Architecture("Gemma3nForCausalLM", _gemma3n, names.GEMMA3N, tops=names.GEMMA3N_TOPS),
    "phi3": Architecture("Phi3ForCausalLM", _phi3, names.FUSED),
    "granite": Architecture("GraniteForCausalLM", _granite, {}, is_permuted=True),
    "granitemoe": Architecture("GraniteMoeForCausalLM", _granite_moe, names.GRANITE, is_permuted=True),
    "granitemoe (shared)": Architecture("GraniteMoeSharedForCausalLM", _granite_moe, names.GRANITE, is_permuted=True),
    "olmo2": Architecture("Olmo2ForCausalLM", _common, names.AFTER),
    "olmo2 (windows)": Architecture("Olmo3ForCausalLM", _common, names.AFTER),
    "olmoe": Architecture("OlmoeForCausalLM", _mixture, {}),
    "deepseek2": Architecture("DeepseekV2ForCausalLM", _deepseek, names.LATENT),
    "deepseek2 (sigmoid)": Architecture("DeepseekV3ForCausalLM", _deepseek, names.LATENT),
    "gpt-oss": Architecture("GptOssForCausalLM", _gpt_oss, names.GPT_OSS),
    "starcoder2": Architecture("Starcoder2ForCausalLM", _starcoder2, names.STARCODER),
    "stablelm": Architecture("StableLmForCausalLM", _stablelm, names.STABLELM),
    "glm4": Architecture("Glm4ForCausalLM", _partial, names.GLM4),
    "glm4moe": Architecture("Glm4MoeForCausalLM", _glm4moe, {"post_attention_norm": "post_attention_layernorm"}),
    "smollm3": Architecture("SmolLM3ForCausalLM", _common, {}, is_permuted=True),
    "mistral3": Architecture("Ministral3ForCausalLM", _mistral3, {}, is_permuted=True),
    "command-r": Architecture("CohereForCausalLM", _cohere, {}),
    "cohere2": Architecture("Cohere2ForCausalLM", _cohere, {}),
    "exaone4": Architecture("Exaone4ForCausalLM", _common, names.AFTER),
    "seed_oss": Architecture("SeedOssForCausalLM", _common, {"post_attention_norm": "post_attention_layernorm"}),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", _ernie, {}),
    "hunyuan-dense": Architecture("HunYuanDenseV1ForCausalLM", _common, names.HUNYUAN),
    "hunyuan-moe": Architecture("HunYuanMoEV1ForCausalLM", _hunyuan_moe, names.HUNYUAN),
    "minimax-m2": Architecture("MiniMaxM2ForCausalLM", _minimax, names.MINIMAX),
    "mamba": Architecture("MambaForCausalLM", _mamba, names.MAMBA, tops=names.MAMBA_TOPS, has_states=True),
    "mamba (norms)": Architecture(
        "FalconMambaForCausalLM", _mamba, names.MAMBA, tops=names.MAMBA_TOPS, has_states=True
    ),
    "jamba": Architecture("JambaForCausalLM", _jamba, names.JAMBA, tops=names.JAMBA_TOPS, has_states=True),
    "nemotron": Architecture("NemotronForCausalLM", _nemotron, {}, shift=1.0),
}
"""By `general.architecture`, with what else distinguishes families behind it."""
