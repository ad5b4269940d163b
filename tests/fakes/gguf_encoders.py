"""GGUF files of encoders, as llama.cpp's converter writes them of the small checkpoints of `vector_models`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.fakes.gguf_files import Stored, gguf_bytes, plain

_LEFT_OUT = r"pooler\.dense|cls\.|lm_head|embeddings\.position_ids|rotary_emb"
_KEYS = {
    "embedding_length": ("hidden_size", "dim"),
    "block_count": ("num_hidden_layers", "n_layers"),
    "feed_forward_length": ("intermediate_size", "hidden_dim"),
    "attention.head_count": ("num_attention_heads", "n_heads"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "norm_eps"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
}


def encoder_tensors(architecture: str, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a checkpoint under the names that gguf-py's table gives them."""
    arch = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names, found = gguf.get_tensor_name_map(arch, 8), dict[str, Tensor]()
    for stored, tensor in weights.items():
        name = re.sub(r"^(bert|roberta|distilbert)\.|^model\.(?!layers\.\d+\.(self_attn|mlp\.\w+_proj))", "", stored)
        if re.match(_LEFT_OUT, name):
            continue
        if "position_embeddings" in name and "Roberta" in config["architectures"][0]:
            tensor = tensor[config["pad_token_id"] + 1 :].clone()
        if re.fullmatch(r"classifier\.(weight|bias)", name):  # with labels, which all heads have here
            name = name.replace("classifier", "classifier.out_proj")
        if architecture == "gemma-embedding" and name.endswith("norm.weight"):
            tensor = tensor + 1
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        found[str(own or names.get_name(f"model.{name}", try_suffixes=(".weight",)))] = tensor
    assert "None" not in found
    return found


def convert_encoder(
    checkpoint: Path,
    architecture: str,
    more: Mapping[str, Any] | None = None,
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
    store: Callable[[str, Tensor], Stored] = lambda name, tensor: plain(tensor),
) -> Path:
    """Write the file of a checkpoint beside it, and return its path. more: metadata, by names without architecture.
    change: what becomes of the tensors before they are written. store: how each is held."""
    config = json.loads((checkpoint / "config.json").read_text())
    own = {key: config[name] for key, names in _KEYS.items() for name in names if config.get(name) is not None}
    length = config["max_position_embeddings"]
    own["context_length"] = length - (config["pad_token_id"] + 1) * ("Roberta" in config["architectures"][0])
    rope = config.get("rope_parameters") or {}
    for kind, key in (("full_attention", "freq_base"), ("sliding_attention", "freq_base_swa")):
        if (theta := rope.get(kind, rope).get("rope_theta")) is not None:
            own[f"rope.{key}"] = float(theta)
    if "local_attention" in config:
        own |= {"attention.sliding_window": config["local_attention"], "attention.sliding_window_pattern": 3}
    elif config.get("sliding_window"):
        own["attention.sliding_window"] = config["sliding_window"]
    own["attention.causal"] = False
    own.setdefault("attention.layer_norm_epsilon", 1e-12)
    tensors = change(encoder_tensors(architecture, config, load_file(checkpoint / "model.safetensors")))
    metadata = {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in own.items()}
    metadata |= {key if key.startswith("tokenizer.") else f"{architecture}.{key}": v for key, v in (more or {}).items()}
    path = checkpoint.with_suffix(".gguf")
    path.write_bytes(gguf_bytes(metadata, {name: store(name, each) for name, each in tensors.items()}))
    return path


def squeezed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As older converters write tensors: without dimensions of one."""
    return {name: each.squeeze() if each.numel() > 1 else each for name, each in tensors.items()}


def joined(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With queries, keys and values in one tensor, as releases of Jina have them."""
    found = {name: each for name, each in tensors.items() if not re.search(r"\.attn_[qkv]\.", name)}
    for name in (each for each in tensors if ".attn_q." in each):
        found[name.replace("attn_q", "attn_qkv")] = torch.cat([tensors[name.replace("_q.", f"_{p}.")] for p in "qkv"])
    return found


def halved(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With gates and what they gate in tensors of their own, as older converters write JinaBERT."""
    found = dict(tensors)
    for name in (each for each in tensors if each.endswith("ffn_up.weight")):
        found[name.replace("up", "gate")], found[name] = tensors[name].chunk(2)
    return found
