"""Cohere's Command R7B and A: Command R with windows in three of four layers, the others without rotation.

Source: https://arxiv.org/abs/2504.00698.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Self

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.norm import LayerNorm
from octavo.models.blocks import GatedDecoder, ParallelLayer
from octavo.models.config import DecoderConfig, read_windows

ARCHITECTURES = ("Cohere2ForCausalLM",)


class Cohere2Config(DecoderConfig):
    """Heads turn in neighbouring pairs."""

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("hidden_act", "silu")
        bias = c.bool("attention_bias", False)
        windows = read_windows(c, is_windowed=True, default=4096, pattern=4)
        config = cls.common(
            c,
            interleaved=True,
            norm=partial(LayerNorm, bias=False),
            norm_eps=c.positive_float("layer_norm_eps", 1e-5),
            tied=c.bool("tie_word_embeddings", True),
            qkv_bias=bias,
            out_bias=bias,
            logit_multiplier=c.float("logit_scale", 0.0625),
            windows=windows,
        )
        full = windows or (None,) * config.num_layers
        return replace(config, ropes=tuple(None if window is None else config.rope for window in full))


class Cohere2ForCausalLM(GatedDecoder):
    """The whole model."""

    Config = Cohere2Config

    def __init__(self, c: Cohere2Config, mesh: Mesh) -> None:
        super().__init__(c, mesh, layer=ParallelLayer)


MODEL = Cohere2ForCausalLM
