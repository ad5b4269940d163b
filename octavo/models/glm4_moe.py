"""GLM-4.5 to 4.7: half of each head turns, and mixtures of experts behind the first layers.

Source: https://arxiv.org/abs/2508.06471.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.models.blocks import GatedDecoder, GatedMLP
from octavo.models.config import DecoderConfig
from octavo.models.sparse import Mixture, SparseMLP, corrected, dense_first

ARCHITECTURES = ("Glm4MoeForCausalLM",)


@dataclass(frozen=True, kw_only=True)
class Glm4MoeConfig(DecoderConfig):
    """`sparse[layer]` says which layers have the mixture."""

    mixture: Mixture
    sparse: tuple[bool, ...]

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("hidden_act", "silu")
        return cls.common(
            c,
            rotary_share=0.5,
            norm_eps=c.positive_float("rms_norm_eps", 1e-5),
            qk_norm=c.bool("use_qk_norm", False),
            qkv_bias=c.bool("attention_bias", False),
            mixture=corrected(c, groups=(1, 1), factor=1.0),
            sparse=dense_first(c, 1),
        )


class Glm4MoeForCausalLM(GatedDecoder):
    """The whole model."""

    Config = Glm4MoeConfig

    def __init__(self, c: Glm4MoeConfig, mesh: Mesh) -> None:
        super().__init__(
            c, mesh, mlp=lambda layer: SparseMLP(c, c.mixture, mesh) if c.sparse[layer] else GatedMLP(c, mesh)
        )


MODEL = Glm4MoeForCausalLM
