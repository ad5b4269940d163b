"""Qwen3-MoE: Qwen3 whose MLPs are mixtures of experts.

Source: https://arxiv.org/abs/2505.09388.
"""

from __future__ import annotations

from typing import Self

from octavo.config.checkpoint import Checkpoint
from octavo.models.config import read_windows
from octavo.models.sparse import Mixture, SparseConfig, SparseDecoder, read_stored, sparse_layers
from octavo.ops.experts import RouterRule

ARCHITECTURES = ("Qwen3MoeForCausalLM",)


class Qwen3MoeConfig(SparseConfig):
    """Normalises queries and keys head by head."""

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("hidden_act", "silu")
        bias = c.bool("attention_bias", False)
        experts = c.positive("num_local_experts" if c.values.get("num_local_experts") else "num_experts")
        rule = RouterRule(c.positive("num_experts_per_tok"), is_normalized=c.bool("norm_topk_prob", False))
        return cls.common(
            c,
            head_dim=c.optional_positive("head_dim"),
            qk_norm=True,
            qkv_bias=bias,
            out_bias=bias,
            windows=read_windows(c, is_windowed=c.bool("use_sliding_window", False)),
            mixture=Mixture(
                experts=experts, width=c.positive("moe_intermediate_size"), rule=rule, stored=read_stored(c)
            ),
            sparse=sparse_layers(c),
        )


class Qwen3MoeForCausalLM(SparseDecoder):
    """The whole model."""

    Config = Qwen3MoeConfig


MODEL = Qwen3MoeForCausalLM
