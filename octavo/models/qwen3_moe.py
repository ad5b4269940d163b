"""Qwen3-MoE: Qwen3 whose MLPs are mixtures of experts.

Source: https://arxiv.org/abs/2505.09388.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.models.blocks import GatedDecoder, GatedMLP
from octavo.models.config import DecoderConfig, read_windows
from octavo.models.sparse import Mixture, SparseMLP, read_stored, sparse_layers
from octavo.ops.experts import RouterRule

ARCHITECTURES = ("Qwen3MoeForCausalLM",)


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(DecoderConfig):
    """`sparse[layer]` says which layers have the mixture."""

    mixture: Mixture
    sparse: tuple[bool, ...]

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


class Qwen3MoeForCausalLM(GatedDecoder):
    """The whole model."""

    Config = Qwen3MoeConfig

    def __init__(self, c: Qwen3MoeConfig, mesh: Mesh) -> None:
        super().__init__(
            c, mesh, mlp=lambda layer: SparseMLP(c, c.mixture, mesh) if c.sparse[layer] else GatedMLP(c, mesh)
        )


MODEL = Qwen3MoeForCausalLM
