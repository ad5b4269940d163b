"""Nemotron-NAS of transformers' parts of Llama: there is no class of it there."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama as llama


class LinearAttention(nn.Module):
    """One product in the place of attention."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.linear_attn = nn.Linear(config.hidden_size, config.hidden_size, bias=config.attention_bias)

    def forward(self, hidden_states: Tensor, **others: Any) -> tuple[Tensor, None]:
        return self.linear_attn(hidden_states), None


class LinearMLP(nn.Module):
    """One product in the place of an MLP."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.linear_mlp = nn.Linear(config.hidden_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.linear_mlp(x)
        return made


class NoAttention(nn.Module):
    """Adds nothing."""

    def forward(self, hidden_states: Tensor, **others: Any) -> tuple[Tensor, None]:
        return torch.zeros_like(hidden_states), None


class NoMLP(nn.Module):
    """Adds nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


def llama_of_blocks(config: Any) -> Any:
    """Return transformers' Llama with what `block_configs` of its config says in each layer."""
    model = llama.LlamaForCausalLM(config)
    for index, (layer, block) in enumerate(zip(model.model.layers, config.block_configs, strict=True)):
        attention, ffn, own = block["attention"], block["ffn"], copy(config)
        if attention.get("no_op"):
            layer.self_attn, layer.input_layernorm = NoAttention(), nn.Identity()
        elif attention.get("replace_with_linear"):
            layer.self_attn = LinearAttention(config)
        else:
            group = attention.get("n_heads_in_group")
            own.num_key_value_heads = own.num_attention_heads // group if group else attention["num_key_value_heads"]
            layer.self_attn = llama.LlamaAttention(own, index)
        if ffn.get("no_op"):
            layer.mlp, layer.post_attention_layernorm = NoMLP(), nn.Identity()
        elif ffn.get("replace_with_linear"):
            layer.mlp = LinearMLP(config)
        else:
            own.intermediate_size = ffn.get("intermediate_size", 256)  # of a small ffn_mult
            layer.mlp = llama.LlamaMLP(own)
    return model
