"""Phi-3, 3.5 and 4: Llama's block with fused projections, and LongRoPE. Source: https://arxiv.org/abs/2404.14219."""

from __future__ import annotations

from typing import Self

from octavo.config.checkpoint import Checkpoint
from octavo.models.blocks import GatedDecoder
from octavo.models.config import DecoderConfig, read_windows

ARCHITECTURES = ("Phi3ForCausalLM",)


class Phi3Config(DecoderConfig):
    """Queries, keys and values are one tensor, as are both halves of the MLP; a part of each head may stay as it is."""

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("hidden_act", "silu")
        return cls.common(
            c,
            rotary_share=1.0,
            norm_eps=c.positive_float("rms_norm_eps", 1e-5),
            qkv_reads=(),
            gate_up_reads=(),
            windows=read_windows(c, is_windowed=c.values.get("sliding_window") is not None),
        )


class Phi3ForCausalLM(GatedDecoder):
    """The whole model."""

    Config = Phi3Config


MODEL = Phi3ForCausalLM
