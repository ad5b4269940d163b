"""Laguna: heads with softplus gates, of which layers may have different numbers, and DeepSeek V3's mixtures.

Source: https://huggingface.co/poolside/Laguna-XS.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.config.checkpoint import Checkpoint
from octavo.layers.heads import Heads
from octavo.models.blocks import GatedDecoder, head_norms
from octavo.models.config import DecoderConfig, read_windows
from octavo.models.sparse import read_mixture, sparse_by_kind


@dataclass(frozen=True, kw_only=True)
class LagunaConfig(DecoderConfig):
    """`heads` are those of most layers; all have as many heads of keys."""

    query_heads: tuple[int, ...]
    """The heads of queries of each layer."""

    def heads_of(self, layer: int) -> Heads:
        return replace(self.heads, query=self.query_heads[layer])


class LagunaForCausalLM(GatedDecoder):
    """Laguna XS, S and M."""

    REPLACED = {
        ".mlp.experts.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
        ".mlp.shared_expert.": ".mlp.shared_experts.",
    }

    @classmethod
    def read(cls, c: Checkpoint) -> LagunaConfig:
        c.refuse(
            *("attention_bias", "moe_apply_router_weight_on_input", "moe_router_logit_softcapping", "qkv_bias"),
            "swa_attention_sink_enabled",
            because="no release has it, and it is not implemented",
        )
        c.expect_all(norm_topk_prob=True, moe_router_use_sigmoid=True, decoder_sparse_step=1)
        if not c.has_ropes_by_kind():
            c.refuse("swa_rope_parameters", because="state both kinds of layers in rope_parameters")
        gating = c.expect("gating", True, "per-head", "per-element")
        mixture = read_mixture(
            c,
            experts=("num_experts", 256),
            width=("moe_intermediate_size", 512),
            top_k=("num_experts_per_tok", 8),
            score="sigmoid",
            factor=("moe_routed_scaling_factor", 1.0),
            correction="gate.e_score_correction_bias",
            shared_width=("shared_expert_intermediate_size", 512),
        )
        return LagunaConfig.common(
            c,
            head_dim=c.positive("head_dim", 128),
            rotary_share=1.0,
            qk_norms=head_norms,
            attention_gate="g_proj",
            has_head_gates=gating != "per-element",
            gate_operator="gated_by_softplus",
            windows=read_windows(c, is_windowed=False, default=512),
            mixture=mixture,
            sparse=_sparse(c),
            query_heads=_query_heads(c),
        )


def _query_heads(c: Checkpoint) -> tuple[int, ...]:
    """Return the heads of queries of each layer. Raises CheckpointError."""
    name, layers, kv = (
        "num_attention_heads_per_layer",
        c.positive("num_hidden_layers"),
        c.positive("num_key_value_heads"),
    )
    if c.values.get(name) is None:
        return (c.positive("num_attention_heads"),) * layers
    expected = f"for each of {layers} layers a multiple of the key and value heads, which are {kv}"

    def fits(each: object) -> bool:
        return type(each) is int and 0 < each <= 1 << 16 and each % kv == 0

    return tuple(c.listed(name, layers, fits, expected))


def _sparse(c: Checkpoint) -> tuple[bool, ...]:
    """Return which layers are mixtures: those that `mlp_layer_types` names, else all but `mlp_only_layers`."""
    dense = c.values.get("mlp_only_layers")
    if c.values.get("mlp_layer_types") is not None or dense is None:
        return sparse_by_kind(c, 1)
    layers = range(c.positive("num_hidden_layers"))
    if not isinstance(dense, list) or any(each not in layers for each in dense):
        raise c.error("mlp_only_layers", f"a list of layers, which are {len(layers)}")
    return tuple(layer not in dense for layer in layers)
