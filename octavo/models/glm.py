"""GLM-4 of 2024, and GLM-4-0414: half of each head turns, in neighbouring pairs.

GLM-4-0414 has norms before and after attention and MLP. Source: https://arxiv.org/abs/2406.12793.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.models.blocks import GatedDecoder, GatedLayer, SandwichLayer
from octavo.models.config import DecoderConfig

ARCHITECTURES = ("Glm4ForCausalLM", "GlmForCausalLM")


@dataclass(frozen=True, kw_only=True)
class GlmConfig(DecoderConfig):
    """Both halves of the MLP are one tensor."""

    has_norms_after: bool = False

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("hidden_act", "silu")
        return cls.common(
            c,
            head_dim=c.positive("head_dim", 128),
            rotary_share=0.5,
            interleaved=True,
            norm_eps=c.positive_float("rms_norm_eps", 1.5625e-07),
            qkv_bias=c.bool("attention_bias", True),
            gate_up_reads=(),
            has_norms_after=c.architecture.lower().startswith("glm4"),
        )


class GlmForCausalLM(GatedDecoder):
    """The whole model."""

    Config = GlmConfig
    RENAMED: ClassVar[Mapping[str, str]] = {
        "attention_output_norm": "post_self_attn_layernorm",
        "mlp_output_norm": "post_mlp_layernorm",
    }

    def __init__(self, c: GlmConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh, layer=SandwichLayer if c.has_norms_after else GatedLayer)


MODEL = GlmForCausalLM
