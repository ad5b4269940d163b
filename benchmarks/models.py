"""Checkpoints with random weights in the shapes of known models: `python -m benchmarks.models DIRECTORY`.

Speed depends on shapes, not on what a model has learned, so that these measure as the real ones do and nothing has to
be downloaded. Hugging Face layout, bfloat16, with a tokenizer of bytes: any engine can load them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_STANDARD_DEVIATION = 0.02
_SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")
"""Ids 0, 1 and 2."""
_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_COMMON: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "torch_dtype": "bfloat16"}
_LLAMA: dict[str, Any] = _COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
}

_QWEN3: dict[str, Any] = _COMMON | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "llama-3.2-1b": _LLAMA
    | {
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
    },
    "opt-125m": _COMMON
    | {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "vocab_size": 50_272,
        "hidden_size": 768,
        "word_embed_proj_dim": 768,
        "ffn_dim": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    "tiny-llama": _LLAMA
    | {
        "vocab_size": 32_000,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
}
"""Name → config.json. In tiny-llama, what is not arithmetic is all there is to measure."""


def tensor_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each tensor of a checkpoint with this config."""
    return _opt_shapes(config) if config["model_type"] == "opt" else _llama_shapes(config)


def _llama_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, intermediate, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key_value = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.self_attn.q_proj.weight", (query, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (key_value, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (key_value, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, query)
        if config["model_type"] == "qwen3":
            yield f"{layer}.self_attn.q_norm.weight", (head_dim,)
            yield f"{layer}.self_attn.k_norm.weight", (head_dim,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{layer}.mlp.gate_proj.weight", (intermediate, hidden)
        yield f"{layer}.mlp.up_proj.weight", (intermediate, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, intermediate)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def _opt_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, intermediate = config["hidden_size"], config["ffn_dim"]
    yield "model.decoder.embed_tokens.weight", (config["vocab_size"], hidden)
    # OPT's table of positions begins with two rows that are never used
    yield "model.decoder.embed_positions.weight", (config["max_position_embeddings"] + 2, hidden)
    for number in range(config["num_hidden_layers"]):
        layer = f"model.decoder.layers.{number}"
        for name, rows, columns in (
            *((f"self_attn.{part}_proj", hidden, hidden) for part in ("q", "k", "v", "out")),
            ("fc1", intermediate, hidden),
            ("fc2", hidden, intermediate),
        ):
            yield f"{layer}.{name}.weight", (rows, columns)
            yield f"{layer}.{name}.bias", (rows,)
        for name in ("self_attn_layer_norm", "final_layer_norm"):
            yield f"{layer}.{name}.weight", (hidden,)
            yield f"{layer}.{name}.bias", (hidden,)
    yield "model.decoder.final_layer_norm.weight", (hidden,)
    yield "model.decoder.final_layer_norm.bias", (hidden,)


_SMALL = ("qwen3-0.6b", "llama-3.2-1b", "opt-125m", "tiny-llama")


def write_checkpoint(path: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """Write config, weights and tokenizer into the directory `path`, and answer it. The seed decides the weights."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _random(name, shape, generator) for name, shape in tensor_shapes(config)}
    write_config(path, config)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def write_config(path: Path, config: dict[str, Any]) -> Path:
    """Write config and tokenizer into the directory `path`, for random weights that are made in memory."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _write_tokenizer(path, config["max_position_embeddings"])
    return path


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=torch.bfloat16)
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return (torch.randn(shape, generator=generator) * _STANDARD_DEVIATION).to(torch.bfloat16)


def _write_tokenizer(path: Path, max_model_len: int) -> None:
    """A token per byte. The ids beyond have no text; prompts of benchmarks are token ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate([*_SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in _SPECIAL_TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))
    bos, eos, padding = _SPECIAL_TOKENS
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": padding,
        "model_max_length": max_model_len,
        "chat_template": _CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="gets a directory for each model")
    parser.add_argument("--models", nargs="+", choices=CONFIGS, default=_SMALL, help="by default the small ones")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for name in arguments.models:
        print(write_checkpoint(arguments.directory / name, CONFIGS[name], arguments.seed))


if __name__ == "__main__":
    main()
