"""OLMo 2: norms behind attention and MLP, and over all heads of queries and of keys.

Source: https://arxiv.org/abs/2501.00656.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.models.blocks import GatedDecoder, LateNormLayer, RotaryAttention, width_norms
from octavo.models.config import DecoderConfig

ARCHITECTURES = ("Olmo2ForCausalLM",)


class Olmo2Config(DecoderConfig):
    """As Llama's."""

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("hidden_act", "silu")
        bias = c.bool("attention_bias", False)
        return cls.common(c, norm_eps=c.positive_float("rms_norm_eps", 1e-5), qkv_bias=bias, out_bias=bias)


class Olmo2ForCausalLM(GatedDecoder):
    """The whole model."""

    Config = Olmo2Config
    RENAMED: ClassVar[Mapping[str, str]] = {
        "attention_output_norm": "post_attention_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    }
    carries_residual = False

    def __init__(self, c: Olmo2Config, mesh: Mesh) -> None:
        super().__init__(
            c, mesh, lambda layer: RotaryAttention(c, mesh, layer, width_norms(c, mesh)), layer=LateNormLayer
        )


MODEL = Olmo2ForCausalLM
