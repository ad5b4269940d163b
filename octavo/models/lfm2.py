"""LFM2 and LFM2-MoE: gated short convolutions, and grouped-query attention in some layers.

Source: https://arxiv.org/abs/2511.23404.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import nn

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.experts import StoredExperts
from octavo.layers.recurrent import ConvolutionSizes, GatedConvolution
from octavo.models.blocks import GatedMLP, RotaryAttention
from octavo.models.hybrid import ATTENTION, RECURRENT, HybridConfig, HybridDecoder, read_kinds
from octavo.models.sparse import Mixture, SparseMLP, read_stored
from octavo.ops.experts import RouterRule

ARCHITECTURES = ("Lfm2ForCausalLM", "Lfm2MoeForCausalLM")


@dataclass(frozen=True, kw_only=True)
class Lfm2Config(HybridConfig):
    """`dense_layers` stand before those with mixtures; the width of plain ones is adjusted by three numbers."""

    sizes: ConvolutionSizes
    convolution_bias: bool
    mixture: Mixture | None = None
    dense_layers: int = 0

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        own: dict[str, Any] = {}
        if c.values.get("num_experts") is not None:
            own = {"mixture": _mixture(c), "dense_layers": c.int("num_dense_layers", 0)}
        else:
            own["intermediate_size"] = _width(c)
        layers = range(c.positive("num_hidden_layers"))
        attends = c.values.get("full_attn_idxs") or list(layers)
        return cls.common(
            c,
            qk_norm=True,
            norm_eps=c.positive_float("norm_eps", 1e-5),
            tied=c.bool("tie_word_embeddings", c.bool("tie_embedding", True)),
            gate_up_reads=("w1", "w3"),
            windows=(),
            kinds=read_kinds(c, [ATTENTION if layer in attends else RECURRENT for layer in layers]),
            sizes=ConvolutionSizes(c.positive("hidden_size"), c.positive("conv_L_cache", 3)),
            convolution_bias=c.bool("conv_bias", False),
            **own,
        )


def _width(c: Checkpoint) -> int:
    width = c.positive("block_ff_dim" if c.values.get("block_ff_dim") else "intermediate_size")
    if not c.bool("block_auto_adjust_ff_dim", True):
        return width
    multiple = c.positive("block_multiple_of", 256)
    width = int(c.positive_float("block_ffn_dim_multiplier", 1.0) * (2 * width // 3))
    return -(-width // multiple) * multiple


def _mixture(c: Checkpoint) -> Mixture:
    rule = RouterRule(
        c.positive("num_experts_per_tok"),
        score="sigmoid",
        is_normalized=c.bool("norm_topk_prob", True),
        factor=c.float("routed_scaling_factor", 1.0),
    )
    return Mixture(
        experts=c.positive("num_experts"),
        width=c.positive("moe_intermediate_size"),
        rule=rule,
        stored=read_stored(c, StoredExperts("w1", "w3", "w2")),
        correction="expert_bias" if c.bool("use_expert_bias", True) else None,
    )


class Lfm2ForCausalLM(HybridDecoder):
    """The whole model."""

    Config = Lfm2Config
    RECURRENT_NAME = "conv"
    RENAMED: ClassVar[Mapping[str, str]] = {
        "norm": "embedding_norm",
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp": "feed_forward",
        "down_proj": "w2",
        "o_proj": "out_proj",
        "q_norm": "q_layernorm",
        "k_norm": "k_layernorm",
    }

    def __init__(self, c: Lfm2Config, mesh: Mesh) -> None:
        def mixer(layer: int) -> nn.Module:
            if c.kinds[layer] == ATTENTION:
                return RotaryAttention(c, mesh, layer)
            return GatedConvolution(c.sizes, mesh, bias=c.convolution_bias)

        def mlp(layer: int) -> nn.Module:
            if c.mixture is None or layer < c.dense_layers:
                return GatedMLP(c, mesh)
            return SparseMLP(c, c.mixture, mesh)

        super().__init__(c, mesh, attention=mixer, mlp=mlp)


MODEL = Lfm2ForCausalLM
