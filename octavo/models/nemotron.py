"""Nemotron and Minitron: LayerNorms whose weights are around 0, and a squared ReLU.

Source: https://arxiv.org/abs/2402.16819.
"""

from __future__ import annotations

from functools import partial
from typing import Self

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.elementwise import OPERATOR_OF
from octavo.layers.norm import LayerNorm
from octavo.models.blocks import GatedDecoder, PlainMLP
from octavo.models.config import DecoderConfig

ARCHITECTURES = ("NemotronForCausalLM",)


class NemotronConfig(DecoderConfig):
    """Half of each head turns."""

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        bias = c.bool("attention_bias", False)
        return cls.common(
            c,
            rotary_share=0.5,
            norm=partial(LayerNorm, offset=1.0),
            norm_eps=c.positive_float("norm_eps", 1e-5),
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=c.bool("mlp_bias", False),
            activation=c.expect("hidden_act", *OPERATOR_OF, default="relu2"),
        )


class NemotronForCausalLM(GatedDecoder):
    """The whole model."""

    Config = NemotronConfig

    def __init__(self, c: NemotronConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh, mlp=lambda _: PlainMLP(c, mesh))


MODEL = NemotronForCausalLM
