"""Granite 3: Llama's block with factors at embeddings, scores, residuals and logits, also with mixtures of experts.

Source: IBM's releases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.models.blocks import GatedDecoder
from octavo.models.config import DecoderConfig
from octavo.models.granite_parts import MIXTURE_NAMES, granite_layer, read_factors, read_granite_mixture
from octavo.models.sparse import Mixture, SparseMLP

ARCHITECTURES = ("GraniteForCausalLM", "GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM")


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(DecoderConfig):
    """`mixture` is None where MLPs are dense."""

    mixture: Mixture | None = None

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("hidden_act", "silu")
        bias = c.bool("attention_bias", False)
        own: dict[str, Any] = {"mlp_bias": c.bool("mlp_bias", False)}
        if "num_local_experts" in c.values:
            shared = c.optional_positive("shared_intermediate_size") or 0
            mixture = read_granite_mixture(c, c.positive("intermediate_size"), shared)
            own = {"mixture": mixture, "gate_up_reads": ("input_linear",)}
        return cls.common(c, qkv_bias=bias, out_bias=bias, **read_factors(c), **own)


class GraniteForCausalLM(GatedDecoder):
    """The whole model."""

    Config = GraniteConfig

    def __init__(self, c: GraniteConfig, mesh: Mesh) -> None:
        mixture = c.mixture
        mlp = None if mixture is None else lambda _: SparseMLP(c, mixture, mesh)
        super().__init__(c, mesh, mlp=mlp, layer=granite_layer(c))
        if mixture is not None:  # names follow the checkpoint, not the class
            self.__dict__["RENAMED"] = MIXTURE_NAMES


MODEL = GraniteForCausalLM
