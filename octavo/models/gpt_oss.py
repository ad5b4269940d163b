"""gpt-oss: attention with sinks, a window in every other layer, and mixtures of experts with biases.

Source: https://arxiv.org/abs/2508.10925. Its releases hold the experts in MXFP4, which is refused by name: conversions
to bfloat16 are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.experts import StoredExperts
from octavo.models.blocks import GatedDecoder
from octavo.models.config import DecoderConfig, read_windows
from octavo.models.sparse import Mixture, SparseMLP, read_stored
from octavo.ops.experts import RouterRule

ARCHITECTURES = ("GptOssForCausalLM",)


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(DecoderConfig):
    """All layers have the mixture, whose gates are clamped."""

    mixture: Mixture

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("hidden_act", "silu")
        bias = c.bool("attention_bias", True)
        mixture = Mixture(
            experts=c.positive("num_local_experts"),
            width=c.positive("intermediate_size"),
            # softmax over the chosen ones alone
            rule=RouterRule(c.positive("num_experts_per_tok"), is_normalized=True),
            stored=read_stored(c, StoredExperts(is_stacked=True, is_transposed=True, is_interleaved=True)),
            router_bias=True,
            bias=True,
            activation="clamped_swiglu",
            numbers=(c.positive_float("swiglu_alpha", 1.702), c.positive_float("swiglu_limit", 7.0)),
        )
        return cls.common(
            c,
            head_dim=c.positive("head_dim", 64),
            norm_eps=c.positive_float("rms_norm_eps", 1e-5),
            windows=read_windows(c, is_windowed=True),
            qkv_bias=bias,
            out_bias=bias,
            has_sinks=True,
            mixture=mixture,
        )


class GptOssForCausalLM(GatedDecoder):
    """The whole model."""

    Config = GptOssConfig
    RENAMED: ClassVar[Mapping[str, str]] = {"gate": "router"}

    def __init__(self, c: GptOssConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh, mlp=lambda _: SparseMLP(c, c.mixture, mesh))


MODEL = GptOssForCausalLM
