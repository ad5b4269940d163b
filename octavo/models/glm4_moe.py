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
from octavo.models.sparse import Mixture, SparseMLP, read_stored
from octavo.ops.experts import RouterRule

ARCHITECTURES = ("Glm4MoeForCausalLM",)


@dataclass(frozen=True, kw_only=True)
class Glm4MoeConfig(DecoderConfig):
    """Layers from `first_sparse` on have the mixture."""

    mixture: Mixture
    first_sparse: int

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("hidden_act", "silu")
        experts, width = c.positive("n_routed_experts"), c.positive("moe_intermediate_size")
        rule = RouterRule(
            c.positive("num_experts_per_tok"),
            "sigmoid",
            is_normalized=c.bool("norm_topk_prob", True),
            factor=c.positive_float("routed_scaling_factor", 1.0),
            num_groups=c.positive("n_group", 1),
            groups_kept=c.positive("topk_group", 1),
        )
        if experts % rule.num_groups or rule.groups_kept > rule.num_groups:
            raise c.error("n_group", f"a divisor of n_routed_experts, which is {experts}, and at least topk_group")
        if rule.top_k > experts // rule.num_groups * rule.groups_kept:
            raise c.error("num_experts_per_tok", "at most the experts of topk_group groups")
        mixture = Mixture(
            experts=experts,
            width=width,
            rule=rule,
            stored=read_stored(c),
            correction="gate.e_score_correction_bias",
            shared_width=width * (c.optional_positive("n_shared_experts") or 0),
        )
        return cls.common(
            c,
            rotary_share=0.5,
            norm_eps=c.float("rms_norm_eps", 1e-5),
            qk_norm=c.bool("use_qk_norm", False),
            qkv_bias=c.bool("attention_bias", False),
            mixture=mixture,
            first_sparse=c.int("first_k_dense_replace", 1),
        )


class Glm4MoeForCausalLM(GatedDecoder):
    """The whole model."""

    Config = Glm4MoeConfig

    def __init__(self, c: Glm4MoeConfig, mesh: Mesh) -> None:
        super().__init__(
            c, mesh, mlp=lambda layer: SparseMLP(c, c.mixture, mesh) if layer >= c.first_sparse else GatedMLP(c, mesh)
        )


MODEL = Glm4MoeForCausalLM
