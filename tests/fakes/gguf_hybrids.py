"""GGUF files of architectures whose converter puts tensors into other shapes or another order, most of them hybrids."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_EXPERT_NAMES = {"w1": "gate", "w2": "down", "w3": "up"}
_NAMES = {
    r"(?:self_attn|mixer)\.([qkv])_proj": r"attn_\1",
    r"(?:self_attn|mixer)\.o_proj|self_attn\.out_proj|self_attention\.dense": "attn_output",
    r"self_attn\.([qk])_(?:layer)?norm": r"attn_\1_norm",
    r"self_attention\.query_key_value": "attn_qkv",
    r"(?:mamba|mixer)\.in_proj": "ssm_in",
    r"(?:mamba|mixer|linear_attn)\.(conv1d|norm)": r"ssm_\1",
    r"(?:mamba|mixer|linear_attn)\.dt_bias": "ssm_dt.bias",
    r"(?:mamba|mixer|linear_attn)\.out_proj": "ssm_out",
    r"linear_attn\.in_proj_z": "attn_gate",
    r"linear_attn\.in_proj_qkv": "attn_qkv",
    r"linear_attn\.in_proj_a": "ssm_alpha",
    r"linear_attn\.in_proj_b": "ssm_beta",
    r"linear_attn\.in_proj_ba": "ssm_ba",
    r"conv\.(conv|in_proj|out_proj)": r"shortconv.\1",
    "input_layernorm|attention_layernorm|operator_norm|norm|ln_mlp": "attn_norm",
    "ln_attn": "attn_norm_2",
    "ffn_norm|feedforward_layernorm|pre_ff_layernorm|pre_feedforward_layernorm": "ffn_norm",
    r"(?:mlp|feed_forward|mixer)\.(gate|up|down)_proj": r"ffn_\1",
    r"feed_forward\.w1": "ffn_gate",
    r"mlp\.dense_h_to_4h|feed_forward\.w3": "ffn_up",
    r"mlp\.dense_4h_to_h|feed_forward\.w2": "ffn_down",
    r"(?:mlp|feed_forward|mixer)\.(?:gate|router)|router\.proj|block_sparse_moe\.router\.layer": "ffn_gate_inp",
    r"router\.scale": "ffn_gate_inp.scale",
    r"router\.per_expert_scale": "ffn_down_exps.scale",
    r"(?:mlp|feed_forward|mixer)\.shared_experts?\.(gate|up|down)_proj": r"ffn_\1_shexp",
    r"mlp\.shared_expert_gate": "ffn_gate_inp_shexp",
    r"shared_mlp\.output_linear": "ffn_down_shexp",
    r"block_sparse_moe\.output_linear|experts\.down_proj": "ffn_down_exps",
    r"experts\.gate_up_proj": "ffn_gate_up_exps",
    "layer_scalar": "layer_output_scale",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_feedforward_layernorm_(.)": r"post_ffw_norm_\1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    r".*(?:e_score_correction|expert)_bias": "exp_probs_b.bias",
}
_TOP = {
    "embed_tokens|embeddings|word_embeddings": "token_embd",
    "norm|norm_f|final_layernorm|ln_f": "output_norm",
    "embedding_norm": "token_embd_norm",
    "embed_tokens_per_layer": "per_layer_token_embd",
    "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
    "lm_head": "output",
}
ARCHITECTURES = (
    *("qwen3next", "qwen35", "qwen35moe", "gemma4", "llama4", "lfm2", "lfm2moe", "granitehybrid", "nemotron_h_moe"),
    *("falcon-h1", "falcon", "mamba2", "ernie4_5-moe", "apertus"),
)
_AFTER_ATTENTION = {
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe", "gemma4"), "post_attention_norm"),
    **dict.fromkeys(("llama4", "ernie4_5-moe", "granitehybrid"), "ffn_norm"),
}


def tensors_of(architecture: str, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a checkpoint under the names and in the order of the converter."""
    found: dict[str, Tensor] = {}
    experts: dict[str, list[Tensor]] = {}
    for stored, tensor in sorted(weights.items(), key=lambda each: [int(n) for n in re.findall(r"\d+", each[0])]):
        layered = re.fullmatch(r"\w+\.(?:layers|h)\.(\d+)\.(.*)", stored)
        if layered is None:
            module, _, suffix = stored.removeprefix(stored.partition(".")[0] + ".").rpartition(".")
            module = module or stored.removesuffix(".weight")
            shift = architecture.startswith("qwen") and "norm" in module
            found[f"{_renamed(_TOP, module)}.{suffix}"] = tensor + shift
            continue
        layer, own = layered.groups()
        if ".act_fn." in own:  # in the metadata
            continue
        if expert := re.fullmatch(r"\w+\.experts\.\d+\.(\w+)\.weight", own):
            kind = _EXPERT_NAMES.get(expert[1], expert[1].removesuffix("_proj"))
            experts.setdefault(f"blk.{layer}.ffn_{kind}_exps.weight", []).append(tensor)
            continue
        found |= {f"blk.{layer}.{name}": each for name, each in _of_layer(architecture, config, own, tensor)}
    if architecture == "gemma4":
        full = config["rope_parameters"]["full_attention"]
        pairs, share = _wide(config)[1] // 2, full["partial_rotary_factor"]
        found["rope_freqs.weight"] = torch.where(torch.arange(pairs) < int(share * pairs), 1.0, 1e30)
    return found | {name: torch.stack(each) for name, each in experts.items()}


def _of_layer(architecture: str, config: Mapping[str, Any], own: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    two_dims = architecture in ("mamba2", "nemotron_h_moe", "falcon-h1", "granitehybrid")
    if own.endswith((".A_log", ".D")):
        tensor = -tensor.exp() if own.endswith("A_log") else tensor
        name = "ssm_a" if own.endswith("A_log") else "ssm_d"
        yield name, (tensor[:, None] if two_dims else _tiled(architecture, config, name, tensor))
        return
    if own.endswith("in_proj_qkvz.weight"):
        keys, dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
        width = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
        parts = tensor.view(keys, -1, tensor.shape[1]).split([dim, dim, width, width], 1)
        query, key, value, gate = (each.flatten(0, 1) for each in parts)
        yield from (("attn_qkv.weight", torch.cat((query, key, value))), ("attn_gate.weight", gate))
        return
    if own.endswith("input_linear.weight") or own.startswith("feed_forward.experts.gate_up"):
        kind, dim = ("shexp" if own.startswith("shared") else "exps"), -1 if architecture == "llama4" else -2
        for each, half in zip(("gate", "up"), tensor.chunk(2, dim=dim), strict=True):
            yield f"ffn_{each}_{kind}.weight", half.transpose(1, 2).contiguous() if dim == -1 else half
        return
    if own == "feed_forward.experts.down_proj":
        yield "ffn_down_exps.weight", tensor.transpose(1, 2).contiguous()
        return
    module = own.removesuffix(".weight").removesuffix(".bias")
    if module == "post_attention_layernorm":
        name = _AFTER_ATTENTION[architecture]
    else:
        name = _renamed(_NAMES, module)
    suffix = "" if name.endswith((".bias", ".scale")) else ".bias" if own.endswith(".bias") else ".weight"
    if architecture.startswith("qwen") and own.endswith("norm.weight") and name != "ssm_norm":
        tensor = tensor + 1
    if name in ("ssm_conv1d", "shortconv.conv") and suffix == ".weight":
        tensor = tensor.squeeze(1)
    if name == "ssm_norm" and two_dims:
        tensor = tensor.view(config.get("mamba_n_groups") or config["n_groups"], -1)
    yield f"{name}{suffix}", _tiled(architecture, config, name.partition(".")[0], tensor)


def _renamed(names: Mapping[str, str], module: str) -> str:
    found = [re.sub(f"^(?:{old})$", new, module) for old, new in names.items() if re.fullmatch(old, module)]
    assert len(found) == 1, module
    return found[0]


def _tiled(architecture: str, config: Mapping[str, Any], name: str, tensor: Tensor) -> Tensor:
    """Bring rows, or columns, into the order of the converter."""
    if architecture in ("granitehybrid", "nemotron_h_moe") and name in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if name == "attn_q" else "num_key_value_heads"]
        return tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
    if architecture == "falcon" and name == "attn_qkv":
        heads, kv = config["num_attention_heads"], config["num_kv_heads"]
        groups = tensor.view(kv, heads // kv + 2, -1, *tensor.shape[1:])
        return torch.cat([each.flatten(0, 2) for each in groups.split([heads // kv, 1, 1], 1)])
    if architecture not in ("qwen35", "qwen35moe"):
        return tensor
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]

    def by_turn(rows: Tensor) -> Tensor:
        return rows.view(keys, heads // keys, -1, *rows.shape[1:]).transpose(0, 1).flatten(0, 2)

    if name == "ssm_out":
        return by_turn(tensor.t()).t().contiguous()
    if name in ("attn_gate", "ssm_alpha", "ssm_beta", "ssm_dt", "ssm_a"):
        return by_turn(tensor)
    before = 2 * keys * config["linear_key_head_dim"]
    has_rest = name == "ssm_conv1d" or (name == "attn_qkv" and len(tensor) > before)
    return torch.cat((tensor[:before], by_turn(tensor[before:]))) if has_rest else tensor


def metadata_of(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """What the converter writes of a config beside what it writes of all."""
    own: dict[str, Any] = {}
    kinds = config.get("layer_types") or config.get("layers_block_type") or []
    attends = [each in ("full_attention", "attention") for each in kinds]
    if "attn_layer_indices" in config:
        attends = [layer in config["attn_layer_indices"] for layer in range(config["num_hidden_layers"])]
    if architecture in ("lfm2", "lfm2moe", "granitehybrid", "nemotron_h_moe"):
        own["attention.head_count_kv"] = [config["num_key_value_heads"] * each for each in attends]
    if architecture.startswith("lfm2"):
        own |= {"shortconv.l_cache": config["conv_L_cache"], "attention.layer_norm_rms_epsilon": config["norm_eps"]}
        own |= {"leading_dense_block_count": config.get("num_dense_layers", 0)}
    if architecture.startswith("qwen"):
        dim, heads = config["linear_value_head_dim"], config["linear_num_value_heads"]
        own |= {"ssm.inner_size": dim * heads, "ssm.time_step_rank": heads}
        own |= {"ssm.state_size": config["linear_key_head_dim"], "ssm.group_count": config["linear_num_key_heads"]}
        own |= {"ssm.conv_kernel": config["linear_conv_kernel_dim"], "rope.dimension_sections": [11, 11, 10, 0]}
        own["rope.dimension_count"] = int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"])
    if architecture in ("granitehybrid", "falcon-h1", "nemotron_h_moe", "mamba2"):
        own |= _scan(config)
    if architecture == "granitehybrid":
        own["rope.scaling.finetuned"] = "Bamba" in config["architectures"][0]
        own["rope.dimension_count"] = 4 if own["rope.scaling.finetuned"] else 8
    if architecture == "nemotron_h_moe":
        own |= {"block_count": len(kinds), "attention.layer_norm_epsilon": config["layer_norm_epsilon"]}
        own |= {"expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"]}
        own |= {"feed_forward_length": [config["moe_intermediate_size"] * (each == "moe") for each in kinds]}
    if architecture == "mamba2":
        own |= {"feed_forward_length": 0, "attention.head_count": 0, "context_length": 1 << 20}
        own |= {"attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"]}
    if architecture == "falcon":
        own |= {"context_length": 2048, "feed_forward_length": 4 * config["hidden_size"]}
        own |= {"attention.layer_norm_epsilon": config["layer_norm_epsilon"]}
        own |= {"attention.head_count_kv": config["num_kv_heads"]}
    if architecture == "ernie4_5-moe":
        own |= {"expert_count": config["moe_num_experts"], "expert_used_count": config["moe_k"]}
        own |= {"leading_dense_block_count": config["moe_layer_start_index"], "expert_shared_count": 2}
    if architecture == "llama4":
        own |= {"feed_forward_length": config["intermediate_size_mlp"]}
        own |= {"expert_feed_forward_length": config["intermediate_size"]}
    return own | (_gemma4(config) if architecture == "gemma4" else {})


def _scan(config: Mapping[str, Any]) -> dict[str, int]:
    def first(*names: str) -> int:
        return next(int(config[name]) for name in names if config.get(name) is not None)

    heads = first("mamba_n_heads", "mamba_num_heads", "num_heads")
    return {
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * first("mamba_d_head", "mamba_head_dim", "head_dim"),
        "ssm.group_count": first("mamba_n_groups", "n_groups"),
        "ssm.state_size": first("mamba_d_state", "ssm_state_size", "state_size"),
        "ssm.conv_kernel": first("mamba_d_conv", "conv_kernel"),
    }


def _wide(config: Mapping[str, Any]) -> tuple[int, int]:
    """The heads of keys in layers without a window, and their size."""
    own = next(iter(config["per_layer_config"].values()))
    return own.get("num_key_value_heads", config["num_key_value_heads"]), own["head_dim"]


def _gemma4(config: Mapping[str, Any]) -> dict[str, Any]:
    windows, sharing = [each == "sliding_attention" for each in config["layer_types"]], config["num_kv_shared_layers"]
    own: dict[str, Any] = {
        "attention.sliding_window_pattern": windows,
        "attention.key_length": _wide(config)[1],
        "attention.key_length_swa": config["head_dim"],
        "rope.freq_base_swa": float(config["rope_parameters"]["sliding_attention"]["rope_theta"]),
    }
    if config.get("use_double_wide_mlp"):
        first, width = len(windows) - sharing, config["intermediate_size"]
        own["feed_forward_length"] = [width * (1 + (layer >= first)) for layer in range(len(windows))]
    kv, wide = config["num_key_value_heads"], _wide(config)[0]
    if kv != wide:
        own["attention.head_count_kv"] = [kv if each else wide for each in windows]
    if config.get("enable_moe_block"):
        own["expert_used_count"] = config["top_k_experts"]
    return own


def of_blocks(blocks: list[dict[str, Any]], heads: int) -> dict[str, Any]:
    """What the metadata say of the layers of Nemotron-NAS."""
    groups = [each["attention"].get("n_heads_in_group") for each in blocks]
    mlps = [each["ffn"] for each in blocks]
    return {
        "attention.head_count": [0 if each["attention"].get("no_op") else heads for each in blocks],
        "attention.head_count_kv": [heads // group if group else 0 for group in groups],
        "feed_forward_length": [256 if "ffn_mult" in each else each.get("intermediate_size", 0) for each in mlps],
    }
