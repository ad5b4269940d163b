"""Tiny random checkpoints of architectures that only transformers has a class for."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

_SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "moe_intermediate_size": 32,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
    "num_experts_per_tok": 2,
}


def make_stranger(model_type: str, path: Path, *, with_weights: bool = True, **overrides: Any) -> Path:
    """Write a random model of transformers' class for text, with weights whose logits differ clearly."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = CONFIG_MAPPING[model_type]
    default = kind()
    sizes = {name: value for name, value in _SIZES.items() if hasattr(default, name)}
    if getattr(default, "layer_types", None):
        kinds = list(dict.fromkeys(default.layer_types))
        sizes["layer_types"] = [kinds[layer % len(kinds)] for layer in range(_SIZES["num_hidden_layers"])]
    config = kind(**{**sizes, **overrides})
    if not with_weights:
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
        config.save_pretrained(path)
        return path
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(noise * 0.2 + (0.0 if name.endswith("bias") else 1.0))
            else:
                parameter.copy_(noise * 2.0 / parameter.shape[-1] ** 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(path)
    return path
