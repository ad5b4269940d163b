"""GGUF files, as llama.cpp's converter writes them of checkpoints in Hugging Face layout."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.fakes import gguf_hybrids, gguf_mapped

NUMBERS = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12,
    "Q5_K": 13, "Q6_K": 14, "Q8_K": 15, "IQ2_XXS": 16, "IQ2_XS": 17, "IQ3_XXS": 18, "IQ1_S": 19, "IQ4_NL": 20,
    "IQ3_S": 21, "IQ2_S": 22, "IQ4_XS": 23, "IQ1_M": 29, "BF16": 30, "TQ1_0": 34, "TQ2_0": 35, "MXFP4": 39,
}  # fmt: skip
Stored = tuple[str, tuple[int, ...], bytes]
"""Type, shape from the outermost dimension on, and data."""


def plain(tensor: Tensor) -> Stored:
    """A tensor in its own type."""
    kind = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[tensor.dtype]
    return kind, tuple(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().tobytes()


def text(value: str) -> bytes:
    """A string in a header."""
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(value: Any) -> bytes:
    """A value of the metadata with its type."""
    if isinstance(value, list):
        inner = [entry(each) for each in value]
        kind = inner[0][:4] if inner else struct.pack("<I", 4)
        return struct.pack("<I", 9) + kind + struct.pack("<Q", len(value)) + b"".join(each[4:] for each in inner)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<Ii", 5, value)


def gguf_bytes(metadata: Mapping[str, Any], tensors: Mapping[str, Stored], *, version: int = 3) -> bytes:
    """The bytes of a file."""
    header, data = b"", b""
    for key, value in metadata.items():
        header += text(key) + entry(value)
    for name, (kind, shape, content) in tensors.items():
        data += bytes(-len(data) % 32)
        dims = struct.pack(f"<{len(shape)}Q", *shape[::-1])
        header += text(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", NUMBERS[kind], len(data))
        data += content
    start = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata)) + header
    return start + bytes(-len(start) % 32) + data


_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
_SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_SCAN = {
    "in_proj": "ssm_in", "conv1d": "ssm_conv1d", "x_proj": "ssm_x", "dt_proj": "ssm_dt", "out_proj": "ssm_out",
}  # fmt: skip
_TOP = {
    "model.embeddings": "token_embd", "model.norm_f": "output_norm", "model.final_layernorm": "output_norm",
    "model.word_embeddings": "token_embd",
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "model.embed_tokens_per_layer": "per_layer_token_embd", "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}  # fmt: skip
_TOP_STACKS = {"altup_projections": "altup_proj", "altup_unembed_projections": "altup_unembd_proj"}
OWN_NAMES: dict[str, dict[str, str]] = {
    "gemma2": _SANDWICH,
    "gemma3": _SANDWICH,
    "gemma3n": _SANDWICH
    | {"per_layer_input_gate": "inp_gate", "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm"}
    | {"altup.correction_coefs": "altup_correct_coef", "altup.prediction_coefs": "altup_predict_coef"}
    | {"altup.modality_router": "altup_router", "altup.router_norm": "altup_router_norm"}
    | {"laurel.linear_left": "laurel_l", "laurel.linear_right": "laurel_r"}
    | {"laurel.post_laurel_norm": "laurel_post_norm"},
    "bailingmoe2": {
        "attention.query_key_value": "attn_qkv",
        "attention.dense": "attn_output",
        "attention.query_layernorm": "attn_q_norm",
        "attention.key_layernorm": "attn_k_norm",
    },
    "olmo2": {each: _SANDWICH[each] for each in ("post_attention_layernorm", "post_feedforward_layernorm")},
    "qwen2moe": {f"mlp.shared_expert.{each}_proj": f"ffn_{each}_shexp" for each in ("gate", "up", "down")}
    | {"mlp.shared_expert_gate": "ffn_gate_inp_shexp"},
    "phi3": {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    "gpt-oss": {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"},
    "starcoder2": {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
    "glm4": {
        "mlp.gate_up_proj": "ffn_up",
        "post_self_attn_layernorm": "post_attention_norm",
        "post_mlp_layernorm": "post_ffw_norm",
    },
    "seed_oss": {"post_attention_layernorm": "post_attention_norm"},
    "glm4moe": {"post_attention_layernorm": "post_attention_norm"},
    "exaone4": {each: _SANDWICH[each] for each in ("post_attention_layernorm", "post_feedforward_layernorm")},
    **dict.fromkeys(
        ("hunyuan-dense", "hunyuan-moe"),
        {f"mlp.shared_mlp.{each}_proj": f"ffn_{each}_shexp" for each in ("gate", "up", "down")}
        | {"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"}
        | {"mlp.gate.wg": "ffn_gate_inp"},
    ),
    "mamba": {"norm": "attn_norm", **{f"mixer.{ours}": theirs for ours, theirs in _SCAN.items()}},
    "jamba": {f"mamba.{ours}": theirs for ours, theirs in _SCAN.items()}
    | {f"mamba.{each}_layernorm": f"ssm_{each}_norm" for each in ("dt", "b", "c")}
    | {f"feed_forward.{each}_proj": f"ffn_{each}" for each in ("gate", "up", "down")}
    | {"pre_ff_layernorm": "ffn_norm", "feed_forward.router": "ffn_gate_inp"},
    "deci": {"self_attn.linear_attn": "attn_output"},
    "granitemoe": {
        "block_sparse_moe.router.layer": "ffn_gate_inp",
        "block_sparse_moe.output_linear": "ffn_down_exps",
        "shared_mlp.output_linear": "ffn_down_shexp",
    },
    "deepseek2": {f"self_attn.{each}_proj": f"attn_{each}" for each in ("q_a", "q_b")}
    | {f"self_attn.{each}_a_layernorm": f"attn_{each}_a_norm" for each in ("q", "kv")}
    | {"self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa"},
}
_PERMUTED = (
    *("llama", "mistral3", "granite", "granitemoe", "smollm3", "arcee", "internlm2", "minicpm", "olmo", "deepseek"),
    "deci",
)
_OF_CONFIG: dict[str, str] = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_topk": "expert_used_count",
    "clip_qkv": "attention.clamp_kqv",
    "num_shared_experts": "expert_shared_count",
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "use_parallel_residual": "use_parallel_residual",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "final_logit_softcapping": "final_logit_softcapping",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "altup_num_inputs": "altup.num_inputs",
    "altup_active_idx": "altup.active_idx",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    **dict.fromkeys(("state_size", "mamba_d_state"), "ssm.state_size"),
    **dict.fromkeys(("conv_kernel", "mamba_d_conv"), "ssm.conv_kernel"),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank"), "ssm.time_step_rank"),
}


_WHOLE = {
    "altup.correct_output_scale": "altup_correct_scale.weight",
    "self_attn.sinks": "attn_sinks.weight",
    "block_sparse_moe.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.expert_bias": "exp_probs_b.bias",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
}


def permuted(rows: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys with those beside each other that turn together."""
    return torch.cat([torch.stack((a, b), 1).flatten(0, 1) for a, b in (h.chunk(2) for h in rows.chunk(heads))])


def metadata_of(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """What the converter writes of a config."""
    own = {theirs: config[ours] for ours, theirs in _OF_CONFIG.items() if config.get(ours) is not None}
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    own["rope.freq_base"] = float(rope.get("rope_theta", config.get("rope_theta", 10_000.0)))
    if architecture in ("glm4", "glm4moe", "minimax-m2", "stablelm", "nemotron", "phi3"):
        dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        own["rope.dimension_count"] = int(dim * rope.get("partial_rotary_factor", 1.0))
    if architecture == "mistral3" and "llama_4_scaling_beta" in rope:
        own["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
        own["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    if architecture == "deepseek2":
        turned, plain, values = (config[each] for each in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
        rank, is_sigmoid = config["kv_lora_rank"], "V3" in config["architectures"][0]
        own |= {"attention.key_length": rank + turned, "attention.value_length": rank, "rope.dimension_count": turned}
        own |= {"attention.key_length_mla": plain + turned, "attention.value_length_mla": values}
        own |= {"attention.head_count_kv": 1, "expert_gating_func": 1 + is_sigmoid}
        if "mscale_all_dim" in rope:
            own["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    if architecture == "mamba":
        own |= {"ssm.inner_size": config["intermediate_size"], "feed_forward_length": 0, "attention.head_count": 0}
        own |= {"attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"], "context_length": 1 << 20}
        own["ssm.dt_b_c_rms"] = "Falcon" in config["architectures"][0]
    if architecture == "deci":
        own |= gguf_hybrids.of_blocks(config["block_configs"], config["num_attention_heads"])
    if architecture == "jamba":
        period, offset = config["attn_layer_period"], config["attn_layer_offset"]
        attends = [layer % period == offset for layer in range(config["num_hidden_layers"])]
        own["attention.head_count_kv"] = [config["num_key_value_heads"] * each for each in attends]
        own["ssm.inner_size"] = config["mamba_expand"] * config["hidden_size"]
    if architecture == "gemma3n":
        cuts = [NormalDist().inv_cdf(each) if each else -math.inf for each in config["activation_sparsity_pattern"]]
        windows = [each == "sliding_attention" for each in config["layer_types"]]
        own |= {"activation_sparsity_scale": cuts, "attention.sliding_window_pattern": windows}
    if rope.get("rope_type") in ("yarn", "linear"):
        own |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if "original_max_position_embeddings" in rope:
        own["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in own.items()}


def tensors_of(architecture: str, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a checkpoint under the names and in the order of the converter."""
    names = {**_NAMES, **OWN_NAMES.get(architecture, {})}
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for stored, tensor in weights.items():
        name = stored.replace("backbone.", "model.")
        module, _, suffix = name.rpartition(".")
        if module in _TOP:
            found[f"{_TOP[module]}.{suffix}"] = _shifted(architecture, name, tensor)
            continue
        if stacked := re.fullmatch(r"model\.(\w+)\.(\d+)\.weight", name):
            experts.setdefault(f"{_TOP_STACKS[stacked[1]]}.weight", {})[int(stacked[2])] = tensor
            continue
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        assert match, name
        layer, own = f"blk.{match[1]}.", match[2]
        if expert := re.fullmatch(r"(?:mlp|block_sparse_moe|feed_forward)\.experts\.(\d+)\.(\w+)\.weight", own):
            kind = {"w1": "gate", "w2": "down", "w3": "up"}.get(expert[2], expert[2].removesuffix("_proj"))
            experts.setdefault(f"{layer}ffn_{kind}_exps.weight", {})[int(expert[1])] = tensor
            continue
        if own.startswith("mlp.experts."):
            found |= {layer + key: value for key, value in _stacked(architecture, own, tensor).items()}
            continue
        if own.endswith((".A_log", ".D")):
            found |= {f"{layer}ssm_d": tensor} if own.endswith(".D") else {f"{layer}ssm_a": -tensor.exp()}
            continue
        if own in _WHOLE:
            found[layer + _WHOLE[own]] = tensor
            continue
        if own == "self_attn.kv_b_proj.weight":
            heads, sizes = config["num_attention_heads"], (config["qk_nope_head_dim"], config["v_head_dim"])
            keys, values = tensor.view(heads, -1, tensor.shape[1]).split(sizes, 1)
            found |= {f"{layer}attn_k_b.weight": keys.transpose(1, 2), f"{layer}attn_v_b.weight": values}
            continue
        if own.endswith("input_linear.weight"):
            kind = "exps" if own.startswith("block_sparse_moe") else "shexp"
            halves = zip(("gate", "up"), tensor.chunk(2, dim=-2), strict=True)
            found |= {f"{layer}ffn_{each}_{kind}.weight": half for each, half in halves}
            continue
        module = own.removesuffix(f".{suffix}")
        if architecture in _PERMUTED and module in ("self_attn.q_proj", "self_attn.k_proj"):
            is_query = module == "self_attn.q_proj"
            heads = config["num_attention_heads" if is_query else "num_key_value_heads"]
            if architecture == "deci":
                heads = len(tensor) * config["num_attention_heads"] // config["hidden_size"]
            tensor = permuted(tensor, heads)
        tensor = tensor.squeeze(1) if own.endswith("conv1d.weight") else tensor
        tensor = tensor.squeeze(0) if module == "mlp.shared_expert_gate" else tensor
        found[f"{layer}{names[module]}.{suffix}"] = _shifted(architecture, own, tensor)
    return found | {name: torch.stack([each for _, each in sorted(of.items())]) for name, of in experts.items()}


def _shifted(architecture: str, name: str, tensor: Tensor) -> Tensor:
    is_shifted = architecture in ("gemma", "gemma2", "gemma3", "nemotron")
    return tensor + 1 if is_shifted and name.endswith("norm.weight") else tensor


def _rope_factors(config: Mapping[str, Any]) -> dict[str, Tensor]:
    """What divides the frequencies of pairs, where the metadata cannot say it."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{each}.weight": torch.tensor(rope[f"{each}_factor"]) for each in ("short", "long")}
    if rope.get("rope_type") != "llama3":
        return {}
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    turns = (
        rope["original_max_position_embeddings"]
        / (2 * torch.pi)
        * rope["rope_theta"] ** -(torch.arange(0, dim, 2).double() / dim)
    )
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return {"rope_freqs.weight": (1 / ((1 - smooth) / rope["factor"] + smooth)).float()}


def _stacked(architecture: str, own: str, tensor: Tensor) -> dict[str, Tensor]:
    """Stacked experts: of gpt-oss transposed, with rows of gate and up that alternate."""
    kind, is_bias = own.removeprefix("mlp.experts."), own.endswith("_bias")
    suffix = "bias" if is_bias else "weight"
    if architecture == "gpt-oss" and not is_bias:
        tensor = tensor.transpose(1, 2)
    if kind.startswith("down_proj"):
        return {f"ffn_down_exps.{suffix}": tensor}
    gate, up = (tensor[:, 0::2], tensor[:, 1::2]) if architecture == "gpt-oss" else tensor.chunk(2, dim=1)
    return {f"ffn_gate_exps.{suffix}": gate, f"ffn_up_exps.{suffix}": up}


def tokenizer_metadata(path: Path, *, pre: str) -> dict[str, Any]:
    """The tokenizer.json at `path` as metadata of the kind gpt2, without scores, or llama, with them."""
    content = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    model, added = content["model"], {each["id"]: each for each in content["added_tokens"]}
    ids = {**model["vocab"], **{each["content"]: number for number, each in added.items()}}
    tokens = [each for each, _ in sorted(ids.items(), key=lambda pair: pair[1])]
    assert [ids[each] for each in tokens] == list(range(len(tokens)))

    def kind(number: int, token: str) -> int:
        if number in added:
            return 3 if added[number]["special"] else 4
        return 6 if re.fullmatch("<0x[0-9A-F]{2}>", token) else 1

    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    own: dict[str, Any] = {
        "model": "gpt2" if pre else "llama",
        "pre": pre or "default",
        "tokens": tokens,
        "token_type": [kind(number, token) for number, token in enumerate(tokens)],
    }
    if pre:
        own["merges"] = merges
    else:
        ranks = {merge.replace(" ", ""): float(-place) for place, merge in reversed([*enumerate(merges)])}
        own |= {"scores": [ranks.get(token, -1e6) for token in tokens], "unknown_token_id": 0}
    return {f"tokenizer.ggml.{key}": value for key, value in own.items()}


def content_of(
    architecture: str, config: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Metadata and tensors of a checkpoint."""
    metadata = metadata_of(architecture, config)
    other = next((each for each in (gguf_hybrids, gguf_mapped) if architecture in each.ARCHITECTURES), None)
    if other is None:
        return metadata, tensors_of(architecture, config, weights)
    own = {f"{architecture}.{key}": each for key, each in other.metadata_of(architecture, config).items()}
    return metadata | own, other.tensors_of(architecture, config, weights)


def convert(
    checkpoint: Path,
    architecture: str,
    more: Mapping[str, Any] | None = None,
    *,
    store: Callable[[str, Tensor], Stored] = lambda name, tensor: plain(tensor),
) -> Path:
    """Write the file of a checkpoint beside it, and return its path. `store` says how each tensor is held."""
    config = json.loads((checkpoint / "config.json").read_text())
    config = {**config, **config.get("text_config", {})}
    weights = load_file(checkpoint / "model.safetensors")
    metadata, tensors = content_of(architecture, config, weights)
    tensors |= _rope_factors(config)
    numbers: dict[str, list[float]] = {name.rpartition(".")[2]: [] for name in weights if ".act_fn." in name}
    for name in (each for each in weights if ".act_fn." in each):
        numbers[name.rpartition(".")[2]].append(weights[name].item())
    metadata |= {f"xielu.{name}": each for name, each in numbers.items()} | dict(more or {})
    path = checkpoint.with_suffix(".gguf")
    path.write_bytes(gguf_bytes(metadata, {name: store(name, each) for name, each in tensors.items()}))
    return path
