"""DeepSeek V2 and V2-Lite: attention over latents, and mixtures of experts chosen by softmax.

Source: https://arxiv.org/abs/2405.04434.
"""

from __future__ import annotations

from typing import Self

from octavo.config.checkpoint import Checkpoint
from octavo.models.sparse import dense_first, read_mixture
from octavo.models.sparse_latent import SparseLatentConfig, SparseLatentDecoder
from octavo.ops.experts import RouterRule

ARCHITECTURES = ("DeepseekV2ForCausalLM",)


class DeepseekV2Config(SparseLatentConfig):
    """A group of experts is as good as its best one. The weights of experts are not normalised, whatever
    `norm_topk_prob` says, as in transformers."""

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("scoring_func", "softmax", default="softmax")
        c.expect("moe_layer_freq", 1, default=1)
        method = c.str("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise c.error("topk_method", '"greedy" or "group_limited_greedy"')
        has_groups = method == "group_limited_greedy"
        rule = RouterRule(
            c.positive("num_experts_per_tok"),
            factor=c.positive_float("routed_scaling_factor", 1.0),
            num_groups=c.positive("n_group") if has_groups else 1,
            groups_kept=c.positive("topk_group") if has_groups else 1,
            group_best=1,
        )
        return cls.common_latent(c, mixture=read_mixture(c, rule), sparse=dense_first(c, 0))


class DeepseekV2ForCausalLM(SparseLatentDecoder):
    """The whole model."""

    Config = DeepseekV2Config


MODEL = DeepseekV2ForCausalLM
