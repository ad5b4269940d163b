"""DeepSeek V3 and R1, Kimi K2: attention over latents, and mixtures of experts behind the first layers.

Sources: https://arxiv.org/abs/2412.19437, https://arxiv.org/abs/2507.20534.
"""

from __future__ import annotations

from typing import Self

from octavo.config.checkpoint import Checkpoint
from octavo.models.sparse import corrected, dense_first
from octavo.models.sparse_latent import SparseLatentConfig, SparseLatentDecoder

ARCHITECTURES = ("DeepseekV3ForCausalLM", "KimiK2ForCausalLM")


class DeepseekV3Config(SparseLatentConfig):
    """A router adds a correction to the sigmoids that it chooses experts by, from the best groups of them."""

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("moe_layer_freq", 1, default=1)
        return cls.common_latent(c, mixture=corrected(c, groups=(8, 4), factor=2.5), sparse=dense_first(c, 3))


class DeepseekV3ForCausalLM(SparseLatentDecoder):
    """The whole model."""

    Config = DeepseekV3Config


MODEL = DeepseekV3ForCausalLM
