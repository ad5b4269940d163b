"""Qwen2 and 2.5: Llama's block with biased queries, keys and values. Source: https://arxiv.org/abs/2407.10671."""

from __future__ import annotations

from typing import Self

from octavo.config.checkpoint import Checkpoint
from octavo.models.blocks import GatedDecoder
from octavo.models.config import DecoderConfig, read_windows

ARCHITECTURES = ("Qwen2ForCausalLM",)


class Qwen2Config(DecoderConfig):
    """Its releases switch the sliding window off; where it is on, the layers from `max_window_layers` on have it."""

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("hidden_act", "silu")
        return cls.common(c, qkv_bias=True, windows=read_windows(c, is_windowed=c.bool("use_sliding_window", False)))


class Qwen2ForCausalLM(GatedDecoder):
    """The whole model."""

    Config = Qwen2Config


MODEL = Qwen2ForCausalLM
