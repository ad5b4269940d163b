"""GLM-4.5 to 4.7: half of each head turns, and mixtures of experts behind the first layers.

Source: https://arxiv.org/abs/2508.06471.
"""

from __future__ import annotations

from typing import Self

from octavo.config.checkpoint import Checkpoint
from octavo.models.sparse import SparseConfig, SparseDecoder, corrected, dense_first

ARCHITECTURES = ("Glm4MoeForCausalLM",)


class Glm4MoeConfig(SparseConfig):
    """Has dense layers first."""

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


class Glm4MoeForCausalLM(SparseDecoder):
    """The whole model."""

    Config = Glm4MoeConfig


MODEL = Glm4MoeForCausalLM
