"""Llama 2 and 3: rotary grouped-query attention and a gated SiLU MLP. Source: https://arxiv.org/abs/2407.21783."""

from __future__ import annotations

from typing import Self

from octavo.config.checkpoint import Checkpoint
from octavo.models.blocks import GatedDecoder
from octavo.models.config import DecoderConfig

ARCHITECTURES = ("LlamaForCausalLM",)


class LlamaConfig(DecoderConfig):
    """Biases are optional, heads may have a size of their own."""

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("hidden_act", "silu")
        bias = c.bool("attention_bias", False)
        return cls.common(c, qkv_bias=bias, out_bias=bias, mlp_bias=c.bool("mlp_bias", False))


class LlamaForCausalLM(GatedDecoder):
    """The whole model."""

    Config = LlamaConfig


MODEL = LlamaForCausalLM
