"""Granite 3: Llama's block with factors at embeddings, scores, residuals and logits. Source: IBM's releases."""

from __future__ import annotations

from functools import partial
from typing import Self

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.elementwise import Elementwise
from octavo.models.blocks import GatedDecoder, GatedLayer, SandwichLayer
from octavo.models.config import DecoderConfig

ARCHITECTURES = ("GraniteForCausalLM",)


class GraniteConfig(DecoderConfig):
    """The factors are 1 unless the config says otherwise, that of the scores included."""

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("hidden_act", "silu")
        bias = c.bool("attention_bias", False)
        return cls.common(
            c,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=c.bool("mlp_bias", False),
            embedding_multiplier=c.float("embedding_multiplier", 1.0),
            attention_scale=c.float("attention_multiplier", 1.0),
            residual_multiplier=c.float("residual_multiplier", 1.0),
            logit_multiplier=1.0 / c.positive_float("logits_scaling", 1.0),
        )


class GraniteForCausalLM(GatedDecoder):
    """The whole model."""

    Config = GraniteConfig

    def __init__(self, c: GraniteConfig, mesh: Mesh) -> None:
        layer = partial(SandwichLayer, after=lambda c: Elementwise("scaled", c.residual_multiplier))
        super().__init__(c, mesh, layer=layer if c.residual_multiplier != 1 else GatedLayer)


MODEL = GraniteForCausalLM
