"""Gemma: Llama's block with gated GELU. Source: https://arxiv.org/abs/2403.08295."""

from __future__ import annotations

from typing import Self

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.models.blocks import GatedLayer
from octavo.models.gemma_parts import GELU, GemmaBaseConfig, GemmaDecoder

ARCHITECTURES = ("GemmaForCausalLM",)


class GemmaConfig(GemmaBaseConfig):
    """The first configs call the activation gelu; models compute its approximation by tanh."""

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("hidden_act", GELU, "gelu")
        c.expect("hidden_activation", GELU)
        return cls.gemma(c)


class GemmaForCausalLM(GemmaDecoder):
    """The whole model."""

    Config = GemmaConfig

    def __init__(self, c: GemmaConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh, layer=GatedLayer)


MODEL = GemmaForCausalLM
