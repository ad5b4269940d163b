"""Mistral and Ministral: Llama's block with attention over a sliding window, in the layers that layer_types names.

Source: https://arxiv.org/abs/2310.06825.
"""

from __future__ import annotations

from typing import Self

from octavo.config.checkpoint import Checkpoint
from octavo.models.blocks import GatedDecoder
from octavo.models.config import DecoderConfig, read_windows

ARCHITECTURES = ("MinistralForCausalLM", "MistralForCausalLM")


class MistralConfig(DecoderConfig):
    """`sliding_window` null means full attention; a config without the key means the first release's 4096."""

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("hidden_act", "silu")
        is_windowed = c.values.get("sliding_window", 4096) is not None
        return cls.common(c, windows=read_windows(c, is_windowed=is_windowed, default=4096))


class MistralForCausalLM(GatedDecoder):
    """The whole model."""

    Config = MistralConfig


MODEL = MistralForCausalLM
