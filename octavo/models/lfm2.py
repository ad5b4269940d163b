"""LFM2, LFM2-MoE and LFM3: gated short convolutions, and grouped-query attention in some layers.

Sources: https://arxiv.org/abs/2511.23404, Liquid AI's releases.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from octavo.config.checkpoint import Checkpoint
from octavo.config.section import LARGEST_SIZE
from octavo.distributed.mesh import Mesh
from octavo.layers.recurrent import ConvolutionSizes, GatedConvolution
from octavo.models.blocks import SandwichLayer, head_norms
from octavo.models.hybrid import ATTENTION, RECURRENT, SLIDING, HybridConfig, HybridDecoder, read_kinds
from octavo.models.sparse import NORMALIZED, NUMBERED, Mixture, dense_first, read_mixture


class Lfm2ForCausalLM(HybridDecoder):
    """The whole model. `num_dense_layers` stand before those with mixtures."""

    RECURRENT_NAME = "conv"
    RENAMED = {
        "norm": "embedding_norm",
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp": "feed_forward",
        "down_proj": "w2",
        "o_proj": "out_proj",
        "q_norm": "q_layernorm",
        "k_norm": "k_layernorm",
    }

    @classmethod
    def read(cls, c: Checkpoint) -> HybridConfig:
        layers = range(c.positive("num_hidden_layers"))
        own: dict[str, Any] = {}
        if c.values.get("num_experts") is not None:
            own = {"mixture": _mixture(c), "sparse": dense_first(c, 0, "num_dense_layers")}
        else:
            own["intermediate_size"] = _width(c)
        attends = c.values.get("full_attn_idxs") or list(layers)
        if not isinstance(attends, list):
            raise c.error("full_attn_idxs", "a list of layers")
        return HybridConfig.common(
            c,
            qk_norms=head_norms,
            norm_eps=c.positive_float("norm_eps", 1e-5),
            tied=c.bool("tie_word_embeddings", c.bool("tie_embedding", True)),
            gate_up_reads=("w1", "w3"),
            windows=(),
            kinds=read_kinds(c, [ATTENTION if layer in attends else RECURRENT for layer in layers]),
            sizes=ConvolutionSizes(c.positive("hidden_size"), c.positive("conv_L_cache", 3)),
            recurrence=partial(_convolution, bias=c.bool("conv_bias", False)),
            **own,
        )


Lfm2MoeForCausalLM = Lfm2ForCausalLM


class Lfm3ForCausalLM(HybridDecoder):
    """LFM3: norms before and after, a gate for each head of attention, and windows in most layers that attend."""

    RECURRENT_NAME = "conv"
    RENAMED = {
        "norm": "embedding_norm",
        "input_layernorm": "operator_norm",
        "attention_output_norm": "post_operator_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp_output_norm": "post_ffn_norm",
        "mlp": "feed_forward",
        "down_proj": "w2",
    }

    @classmethod
    def read(cls, c: Checkpoint) -> HybridConfig:
        kinds, window = read_kinds(c, known=(ATTENTION, SLIDING, RECURRENT)), c.positive("sliding_window", 256)
        return HybridConfig.common(
            c,
            head_dim=c.positive("head_dim", 128),
            qk_norms=head_norms,
            bias=c.bool("attention_bias", False),
            attention_gate="gate_proj" if c.bool("use_attention_gate", True) else None,
            has_head_gates=True,
            norm_eps=c.positive_float("norm_eps", 1e-5),
            tied=c.bool("tie_word_embeddings", True),
            gate_up_reads=("w1", "w3"),
            windows=tuple(window if kind == SLIDING else None for kind in kinds),
            kinds=tuple(ATTENTION if kind == SLIDING else kind for kind in kinds),
            layer=SandwichLayer if c.bool("use_sandwich_norm", True) else None,
            sizes=ConvolutionSizes(c.positive("hidden_size"), c.positive("conv_L_cache", 7)),
            recurrence=partial(_convolution, bias=c.bool("conv_bias", False)),
        )


def _convolution(c: HybridConfig, mesh: Mesh, layer: int, *, bias: bool) -> GatedConvolution:
    return GatedConvolution(c.sizes, mesh, bias=bias)


def _width(c: Checkpoint) -> int:
    """Return the width of plain MLPs, which three numbers adjust."""
    width = c.positive("block_ff_dim" if c.values.get("block_ff_dim") else "intermediate_size")
    if not c.bool("block_auto_adjust_ff_dim", True):
        return width
    multiple = c.positive("block_multiple_of", 256)
    adjusted = c.positive_float("block_ffn_dim_multiplier", 1.0) * (2 * width // 3)
    if adjusted > LARGEST_SIZE:
        raise c.error("block_ffn_dim_multiplier", f"a factor with which MLPs have at most {LARGEST_SIZE} activations")
    width = int(adjusted)
    return -(-width // multiple) * multiple


def _mixture(c: Checkpoint) -> Mixture:
    return read_mixture(
        c,
        NUMBERED,
        experts="num_experts",
        score="sigmoid",
        is_normalized=NORMALIZED[True],
        factor=c.float("routed_scaling_factor", 1.0),
        correction="expert_bias" if c.bool("use_expert_bias", True) else None,
    )
