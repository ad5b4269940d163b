"""Phi-1, 1.5 and 2: attention and a plain MLP beside each other, behind one LayerNorm.

Source: https://arxiv.org/abs/2306.11644.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.elementwise import OPERATOR_OF
from octavo.layers.norm import LayerNorm
from octavo.models.blocks import GatedDecoder, ParallelLayer, PlainMLP, RotaryAttention
from octavo.models.config import DecoderConfig

ARCHITECTURES = ("PhiForCausalLM",)


@dataclass(frozen=True, kw_only=True)
class PhiConfig(DecoderConfig):
    """Half of each head turns. Every linear has a bias, the head included."""

    has_head_norms: bool = False

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        return cls.common(
            c,
            rotary_share=0.5,
            norm=LayerNorm,
            norm_eps=c.positive_float("layer_norm_eps", 1e-5),
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            head_bias=True,
            activation=c.expect("hidden_act", *OPERATOR_OF, default="gelu_new"),
            has_head_norms=c.bool("qk_layernorm", False),
        )


class PhiForCausalLM(GatedDecoder):
    """The whole model."""

    Config = PhiConfig
    RENAMED: ClassVar[Mapping[str, str]] = {
        "norm": "final_layernorm",
        "o_proj": "dense",
        "q_norm": "q_layernorm",
        "k_norm": "k_layernorm",
        "up_proj": "fc1",
        "down_proj": "fc2",
    }

    def __init__(self, c: PhiConfig, mesh: Mesh) -> None:
        def attention(layer: int) -> RotaryAttention:
            norms = (LayerNorm(c.heads.dim, c.norm_eps), LayerNorm(c.heads.dim, c.norm_eps))
            return RotaryAttention(c, mesh, layer, norms if c.has_head_norms else None)

        super().__init__(c, mesh, attention, lambda _: PlainMLP(c, mesh), layer=ParallelLayer)


MODEL = PhiForCausalLM
