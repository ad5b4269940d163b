"""OLMoE: Llama with norms over all heads of queries and of keys, and mixtures of experts as MLPs.

Source: https://arxiv.org/abs/2409.02060.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.models.blocks import GatedDecoder, RotaryAttention, width_norms
from octavo.models.config import DecoderConfig
from octavo.models.sparse import Mixture, SparseMLP, read_stored
from octavo.ops.experts import RouterRule

ARCHITECTURES = ("OlmoeForCausalLM",)


@dataclass(frozen=True, kw_only=True)
class OlmoeConfig(DecoderConfig):
    """Has a mixture in every layer."""

    mixture: Mixture

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("hidden_act", "silu")
        c.expect("clip_qkv", None, default=None)
        bias = c.bool("attention_bias", False)
        mixture = Mixture(
            experts=c.positive("num_experts"),
            width=c.positive("intermediate_size"),
            rule=RouterRule(c.positive("num_experts_per_tok"), is_normalized=c.bool("norm_topk_prob", False)),
            stored=read_stored(c),
        )
        return cls.common(c, norm_eps=c.float("rms_norm_eps", 1e-5), qkv_bias=bias, out_bias=bias, mixture=mixture)


class OlmoeForCausalLM(GatedDecoder):
    """The whole model."""

    Config = OlmoeConfig

    def __init__(self, c: OlmoeConfig, mesh: Mesh) -> None:
        super().__init__(
            *(c, mesh, lambda layer: RotaryAttention(c, mesh, layer, width_norms(c, mesh))),
            mlp=lambda layer: SparseMLP(c, c.mixture, mesh),
        )


MODEL = OlmoeForCausalLM
