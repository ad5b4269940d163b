"""GGUF files whose tensors have the names that gguf-py's own table gives those of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import gguf
import torch
from torch import Tensor

_TABLES = {"hy_v3": "dots1", "mellum": "qwen3moe", "cohere2moe": "glm4moe", "granite_swa": "deepseek2-ocr"}
"""Architectures that released versions of gguf-py are without, and one with the same names."""
ARCHITECTURES = (
    *("gpt2", "starcoder", "gptneox", "bloom", "mpt", "phi2", "jais2", "minicpm3"),
    *("afmoe", "exaone-moe", "hy_v3", "mellum", "mimo2", "step35"),
    *("glm-dsa", "mistral4", "cohere2moe", "granite_swa", "dbrx", "chatglm", "kimi-linear", "bitnet"),
)
_LIKE = {
    "granite_swa": {
        "block_sparse_moe.router": "mlp.gate",
        "block_sparse_moe": "mlp",
        "shared_mlp.input_linear": "mlp.shared_experts.up_proj",
        "shared_mlp.output_linear": "mlp.shared_experts.down_proj",
    },
    "bitnet": {"attn_sub_norm": "inner_attn_ln", "ffn_sub_norm": "ffn_layernorm"},
    "kimi-linear": {"0.block_sparse_moe": "0.mlp", "dt_bias": "dt_proj.bias"},
}
"""Names of checkpoints, and those that the table of the other architecture knows."""
_KEYS = {
    "context_length": ("max_seq_len", "n_positions"),
    "embedding_length": ("n_embd", "d_model"),
    "block_count": ("n_layer", "n_layers"),
    "attention.head_count": ("n_head", "n_heads"),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon",),
    "rope.dimension_count": ("qk_rope_head_dim",),
    "expert_shared_count": ("num_shared_experts",),
    "leading_dense_block_count": ("num_dense_layers",),
    "expert_weights_norm": ("route_norm",),
    "expert_shared_feed_forward_length": ("share_expert_dim",),
    "expert_weights_scale": ("moe_router_scaling_factor", "route_scale", "router_scaling_factor"),
}


def tensors_of(architecture: str, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a checkpoint under the names and in the order of the converter."""
    own = _TABLES.get(architecture, architecture)
    arch = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == own)
    names, found = gguf.get_tensor_name_map(arch, 8), dict[str, Tensor]()
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in weights.items():
        if expert := re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name):
            experts.setdefault(f"{expert[1]}.{expert[3]}", {})[int(expert[2])] = tensor
            continue
        if name.startswith("vi") or "projector" in name:  # of images
            continue
        new = name.replace("correction_bias", "correction.bias")
        new += ".bias" * new.endswith(("expert_bias", "router_bias"))
        new = new.removeprefix("transformer.") if architecture == "bloom" else new
        new += ".weight" * new.endswith(
            ("sink_bias", "mlp.w1", "mlp.v1", "mlp.w2", "gate_up_proj", "experts.down_proj")
        )
        for theirs, ours in _LIKE.get(architecture, {}).items():
            new = new.replace(theirs, ours)
        if new.endswith("kv_b_proj.weight") and architecture != "minicpm3":  # whose files keep both together
            sizes = config["qk_nope_head_dim"], config["v_head_dim"]
            keys, values = tensor.unflatten(0, (config["num_attention_heads"], -1)).split(sizes, 1)
            found |= {new.replace("kv_b", "k_b"): keys.transpose(1, 2), new.replace("kv_b", "v_b"): values}
            continue
        found[new] = _ordered(architecture, config, name, tensor)
    if architecture == "chatglm" and "kv_channels" in config:  # as the first releases have it
        joined = [[name.replace("q_proj", f"{p}_proj") for p in "qkv"] for name in found if "q_proj" in name]
        found |= {each[0].replace("q_proj", "qkv_proj"): torch.cat([found.pop(one) for one in each]) for each in joined}
    if architecture == "step35":
        found = {name: each + 1 if name.endswith("norm.weight") else each for name, each in found.items()}
    found |= {name: torch.stack([each for _, each in sorted(of.items())]) for name, of in experts.items()}
    sinks = {re.sub(r"model\.layers\.(\d+).*", r"blk.\1.attn_sinks.weight", each): found.pop(each)
             for each in [*found] if each.endswith(".sinks")}  # fmt: skip
    renamed = {names.get_name(name, try_suffixes=(".weight", ".bias")): each for name, each in found.items()} | sinks
    assert None not in renamed
    return {str(name): each for name, each in renamed.items()}


def _ordered(architecture: str, config: Mapping[str, Any], name: str, tensor: Tensor) -> Tensor:
    if architecture == "gpt2" and re.search(r"\.c_\w+\.weight$", name):
        return tensor.t().contiguous()
    if architecture == "kimi-linear" and name.endswith(("conv1d.weight", "A_log")):
        return -tensor.exp() if name.endswith("A_log") else tensor[None]
    if architecture == "granite_swa" and re.search(r"[qk]_proj", name):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()
    if architecture == "dbrx" and "experts" in name:
        stacked = tensor.unflatten(0, (config["ffn_config"]["moe_num_experts"], -1))
        return (stacked.transpose(1, 2) if name.endswith("w2") else stacked).contiguous()
    if architecture not in ("bloom", "gptneox") or "query_key_value" not in name:
        return tensor
    heads = config.get("n_head") or config["num_attention_heads"]
    return tensor.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2).contiguous()


def metadata_of(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """What the converter writes of a config beside what it writes of all."""
    own = {key: config[each] for key, names in _KEYS.items() for each in names if config.get(each) is not None}
    rope = config.get("rope_parameters") or {}
    if "partial_rotary_factor" in rope:
        own["rope.dimension_count"] = int(rope["partial_rotary_factor"] * config["hidden_size"] // 4)
    if architecture == "minicpm3":
        own["attention.key_length"] = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    if architecture in ("exaone-moe", "mellum", "mimo2", "step35"):
        own["attention.sliding_window_pattern"] = [each == "sliding_attention" for each in config["layer_types"]]
        own["rope.freq_base_swa"] = float(rope.get("sliding_attention", rope)["rope_theta"])
    if architecture == "exaone-moe":
        own["leading_dense_block_count"] = config["mlp_layer_types"].count("dense")
    if architecture == "mimo2":
        windows, kv = own["attention.sliding_window_pattern"], config["num_key_value_heads"]
        own |= {"attention.head_count_kv": [kv * (1 + each) for each in windows], "attention.value_scale": 0.707}
        own |= {"attention.value_length": config["v_head_dim"], "rope.dimension_count": config["head_dim"] // 4}
    if architecture == "step35":
        heads = config["num_attention_heads"], config["num_sliding_attention_heads"]
        own["attention.head_count"] = [heads[each] for each in own["attention.sliding_window_pattern"]]
        own["swiglu_clamp_exp"], own["swiglu_clamp_shexp"] = (
            [float(each or 0) for each in config[name]] for name in ("swiglu_limits", "swiglu_limits_shared")
        )
    if architecture == "hy_v3":
        own["expert_shared_feed_forward_length"] = config["moe_intermediate_size"] * config["num_shared_experts"]
    if architecture == "mistral4":
        own |= {"attention.key_length": 32, "attention.key_length_mla": config["qk_head_dim"]}
        own |= {"attention.value_length": config["v_head_dim"], "attention.head_count_kv": 1}
        own |= {"attention.temperature_scale": rope["llama_4_scaling_beta"], "rope.scaling.yarn_log_multiplier": 0.1}
        own["rope.dimension_count"] = config["qk_rope_head_dim"]
    if architecture == "glm-dsa":
        own |= {"attention.key_length": 32, "attention.value_length_mla": config["v_head_dim"]}
        own |= {"attention.key_length_mla": config["qk_head_dim"], "attention.head_count_kv": 1}
        own |= {"expert_gating_func": 2, "leading_dense_block_count": config["mlp_layer_types"].count("dense")}
        names = {"index_n_heads": "head_count", "index_head_dim": "key_length", "index_topk": "top_k"}
        own |= {f"attention.indexer.{theirs}": config[ours] for ours, theirs in names.items()}
    if architecture == "kimi-linear":
        attends = [each == "full_attention" for each in config["layer_types"]]
        own |= {"attention.head_count_kv": [int(each) for each in attends], "kda.head_dim": config["linear_head_dim"]}
        own |= {"ssm.conv_kernel": config["linear_conv_kernel_dim"], "attention.key_length": 32}
        own |= {"attention.key_length_mla": config["qk_head_dim"], "attention.value_length_mla": config["v_head_dim"]}
        own |= {"rope.dimension_count": config["qk_rope_head_dim"], "expert_used_count": 3, "expert_gating_func": 2}
        own["leading_dense_block_count"] = config["mlp_layer_types"].count("dense")
    if architecture in ("cohere2moe", "granite_swa"):
        own["attention.sliding_window_pattern"] = [each == "sliding_attention" for each in config["layer_types"]]
    if architecture == "cohere2moe":
        own |= {"expert_feed_forward_length": config["intermediate_size"]}
        own |= {"expert_gating_func": 1 + (config["expert_selection_fn"] == "sigmoid")}
    if architecture == "granite_swa":
        own["attention.rope_pattern"] = [theta > 0 for theta in config["layer_rope_theta"]]
    if architecture == "dbrx":
        heads, mixture = config["attn_config"], config["ffn_config"]
        own |= {"attention.head_count_kv": heads["kv_n_heads"], "attention.clamp_kqv": heads["clip_qkv"]}
        own |= {"expert_count": mixture["moe_num_experts"], "expert_used_count": mixture["moe_top_k"]}
        own |= {"feed_forward_length": mixture["ffn_hidden_size"]}
    if architecture == "starcoder":
        own["attention.head_count_kv"] = 1
    own.setdefault("feed_forward_length", config.get("intermediate_size") or 4 * own.get("embedding_length", 32))
    if "context_length" not in own:
        own["context_length"] = config.get("max_position_embeddings", 256)
    return own
