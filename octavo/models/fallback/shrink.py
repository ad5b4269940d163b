"""A config of the same class that is quick to compute and has every kind of layer."""

from __future__ import annotations

import copy
from typing import Any, Final

from octavo.models.fallback.library import Library
from octavo.models.fallback.recording import Recording

WINDOW: Final = 16
"""Tokens: the windows of the copy."""
_HEADS: Final = 4
_WIDTH: Final = 64

_TO: Final[dict[str, int]] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 128),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), _WIDTH),
    **dict.fromkeys(
        ("intermediate_size_mlp", "shared_intermediate_size", "moe_shared_expert_intermediate_size"), _WIDTH
    ),
    **dict.fromkeys(("ffn_dim", "ffn_hidden_size", "n_inner", "dense_intermediate_size", "mlp_hidden_size"), _WIDTH),
    **dict.fromkeys(("sliding_window", "attention_window", "attention_chunk_size"), WINDOW),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts", "n_group"), 2),
    **dict.fromkeys(("topk_group",), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "hidden_size_per_layer_input"), 32),
    "max_position_embeddings": 256,
}
"""Keys of configs and their largest values in the copy. Keys that are not set stay so."""


def shrink(library: Library, recording: Recording) -> Library:
    """Return the class with the shrunken config: as many layers as are needed to have each kind, heads of full size."""
    config = copy.deepcopy(library.config)
    layers = num_layers_needed(recording)
    old_layers, old_heads, old_hidden = config.num_hidden_layers, config.num_attention_heads, config.hidden_size
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == old_layers:
            setattr(config, name, [_smaller(name, each) for each in value[:layers]])
    for name in _TO:
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            setattr(config, name, _smaller(name, value))
    kv_heads = getattr(config, "num_key_value_heads", None)
    config.num_hidden_layers = layers
    config.hidden_size = old_hidden // old_heads * _HEADS
    config.num_attention_heads = _HEADS
    if isinstance(kv_heads, int):
        config.num_key_value_heads = _HEADS if kv_heads == old_heads else min(kv_heads, 2)
    return library._replace(config=config)


def _smaller(name: str, value: Any) -> Any:
    is_size = isinstance(value, int) and not isinstance(value, bool)
    return min(value, _TO[name]) if is_size and name in _TO else value


def num_layers_needed(recording: Recording) -> int:
    """Return how many of the first layers have every kind that there is."""
    kinds = layer_kinds(recording)
    return max(kinds.index(kind) for kind in set(kinds)) + 1


def layer_kinds(recording: Recording) -> list[object]:
    """Return the properties, other than sizes, that distinguish layers: classes of modules, and calls of attention."""
    kinds: list[object] = []
    for path, call in recording.calls.items():
        parts = path.split(".")
        layer = recording.causal.get_submodule(".".join(parts[: parts.index(str(call.layer)) + 1]))
        modules = tuple((name, type(module).__name__) for name, module in layer.named_modules() if "." not in name)
        flags = tuple(sorted((name, value) for name, value in _flags(layer)))
        kinds.append((modules, flags, call.window is None, call.soft_cap is None))
    return kinds


def _flags(layer: Any) -> list[tuple[str, bool]]:
    return [
        (f"{path}.{name}", value)
        for path, module in layer.named_modules()
        if path.count(".") < 2
        for name, value in vars(module).items()
        if isinstance(value, bool)
    ]
