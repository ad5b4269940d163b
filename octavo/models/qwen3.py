"""Qwen3: grouped-query attention with per-head q/k norms and a gated SiLU MLP.

Source: https://arxiv.org/abs/2505.09388.
"""

from __future__ import annotations

from typing import Self

from octavo.config.checkpoint import Checkpoint
from octavo.models.blocks import GatedDecoder
from octavo.models.config import DecoderConfig, read_windows

ARCHITECTURES = ("Qwen3ForCausalLM",)


class Qwen3Config(DecoderConfig):
    """Heads have a size of their own; the releases switch the sliding window off, and where it is on, the layers from
    `max_window_layers` on have it."""

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("hidden_act", "silu")
        bias = c.bool("attention_bias", False)
        return cls.common(
            c,
            head_dim=c.positive("head_dim", 128),
            qk_norm=True,
            qkv_bias=bias,
            out_bias=bias,
            windows=read_windows(c, is_windowed=c.bool("use_sliding_window", False)),
        )


class Qwen3ForCausalLM(GatedDecoder):
    """The whole model."""

    Config = Qwen3Config


MODEL = Qwen3ForCausalLM
