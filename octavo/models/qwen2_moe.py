"""Qwen2-MoE: Qwen2 whose MLPs are mixtures of experts beside a gated expert that all tokens take.

Source: https://qwenlm.github.io/blog/qwen-moe/.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

from octavo.config.checkpoint import Checkpoint
from octavo.models.config import read_windows
from octavo.models.sparse import Mixture, SparseConfig, SparseDecoder, read_stored, sparse_layers
from octavo.ops.experts import RouterRule

ARCHITECTURES = ("Qwen2MoeForCausalLM",)


class Qwen2MoeConfig(SparseConfig):
    """Has a gated expert that all tokens take."""

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("hidden_act", "silu")
        c.expect("use_sliding_window", False, default=False)
        mixture = Mixture(
            experts=c.positive("num_experts"),
            width=c.positive("moe_intermediate_size"),
            rule=RouterRule(c.positive("num_experts_per_tok"), is_normalized=c.bool("norm_topk_prob", False)),
            stored=read_stored(c),
            shared_width=c.positive("shared_expert_intermediate_size"),
            is_shared_gated=True,
        )
        windows = read_windows(c, is_windowed=False)
        return cls.common(
            c, qkv_bias=c.bool("qkv_bias", True), windows=windows, mixture=mixture, sparse=sparse_layers(c)
        )


class Qwen2MoeForCausalLM(SparseDecoder):
    """The whole model."""

    Config = Qwen2MoeConfig
    RENAMED: ClassVar[Mapping[str, str]] = {"shared_experts": "shared_expert"}


MODEL = Qwen2MoeForCausalLM
