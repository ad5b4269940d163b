"""Seed-OSS: Llama's block with biased queries, keys and values. Source: ByteDance's releases."""

from __future__ import annotations

from typing import Self

from octavo.config.checkpoint import Checkpoint
from octavo.models.blocks import GatedDecoder
from octavo.models.config import DecoderConfig

ARCHITECTURES = ("SeedOssForCausalLM",)


class SeedOssConfig(DecoderConfig):
    """The projection after attention has a switch of its own for its bias."""

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("hidden_act", "silu")
        return cls.common(
            c,
            head_dim=c.positive("head_dim", 128),
            qkv_bias=c.bool("attention_bias", True),
            out_bias=c.bool("attention_out_bias", False),
            mlp_bias=c.bool("mlp_bias", False),
        )


class SeedOssForCausalLM(GatedDecoder):
    """The whole model."""

    Config = SeedOssConfig


MODEL = SeedOssForCausalLM
