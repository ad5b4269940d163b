"""Ministral: Llama's block with windows in the layers that layer_types names. Source: Mistral AI's releases."""

from __future__ import annotations

from typing import Self

from octavo.config.checkpoint import Checkpoint
from octavo.models.blocks import GatedDecoder
from octavo.models.config import DecoderConfig, read_windows

ARCHITECTURES = ("MinistralForCausalLM",)


class MinistralConfig(DecoderConfig):
    """`sliding_window` null means full attention; without `layer_types` all layers have the window."""

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("hidden_act", "silu")
        is_windowed = c.values.get("sliding_window", 4096) is not None
        return cls.common(c, windows=read_windows(c, is_windowed=is_windowed, default=4096))


class MinistralForCausalLM(GatedDecoder):
    """The whole model."""

    Config = MinistralConfig


MODEL = MinistralForCausalLM
