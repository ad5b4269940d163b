"""GLM-4 of 2024: half of each head turns, in neighbouring pairs. Source: https://arxiv.org/abs/2406.12793."""

from __future__ import annotations

from typing import Self

from octavo.config.checkpoint import Checkpoint
from octavo.models.blocks import GatedDecoder
from octavo.models.config import DecoderConfig

ARCHITECTURES = ("GlmForCausalLM",)


class GlmConfig(DecoderConfig):
    """Both halves of the MLP are one tensor."""

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("hidden_act", "silu")
        return cls.common(
            c,
            head_dim=c.positive("head_dim", 128),
            rotary_share=0.5,
            interleaved=True,
            norm_eps=c.positive_float("rms_norm_eps", 1.5625e-07),
            qkv_bias=c.bool("attention_bias", True),
            gate_up_reads=(),
        )


class GlmForCausalLM(GatedDecoder):
    """The whole model."""

    Config = GlmConfig


MODEL = GlmForCausalLM
