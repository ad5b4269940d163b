"""Step 3.5 Flash: gated heads, of which layers with a window have more, and SwiGLU that is clamped in some layers.

Source: https://arxiv.org/abs/2602.10604.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.experts import StoredExperts
from octavo.layers.heads import Heads
from octavo.layers.norm import RMSNorm
from octavo.models.blocks import GatedDecoder, head_norms, mlp_of
from octavo.models.config import DecoderConfig, windows_by_kind
from octavo.models.sparse import Mixture, sparse_by_kind
from octavo.ops.experts import RouterRule


@dataclass(frozen=True, kw_only=True)
class StepConfig(DecoderConfig):
    """`heads` are those of layers that see all tokens; both kinds have as many heads of keys."""

    windowed_heads: Heads
    limits: tuple[float | None, ...]
    """For each layer the limit of SwiGLU in its experts, None for none; a prediction layer behind them has none."""
    shared_limits: tuple[float | None, ...]
    """Likewise, in the MLP or the expert that all tokens take."""

    def heads_of(self, layer: int) -> Heads:
        return self.heads if self.window_of(layer) is None else self.windowed_heads


class Step3p5ForCausalLM(GatedDecoder):
    """The text model of Step 3.7 Flash, too. Mixtures are those of DeepSeek V3."""

    REPLACED = {
        ".share_expert.": ".mlp.shared_experts.",
        ".moe.gate.": ".mlp.gate.",
        ".moe.router_bias": ".mlp.router_bias",
        ".moe.": ".mlp.experts.",
    }

    @classmethod
    def read(cls, c: Checkpoint) -> StepConfig:
        c.expect_all(norm_expert_weight=True, use_head_wise_attn_gate=True, use_moe_router_bias=True, use_qk_norm=True)
        c.expect_all(zero_centered=True, attention_bias=False, moe_router_activation="sigmoid")
        windows = windows_by_kind(c)
        kv, query = c.positive("num_key_value_heads", 8), c.positive("num_attention_heads")
        windowed = Heads(c.positive("num_sliding_attention_heads", query), kv, c.positive("head_dim", 128))
        if windowed.query % kv:
            raise c.error("num_sliding_attention_heads", f"a multiple of the key and value heads, which are {kv}")
        mixture = Mixture(
            experts=c.positive("n_routed_experts", 288),
            width=c.positive("moe_intermediate_size", 1280),
            rule=RouterRule(
                c.positive("num_experts_per_tok", 8),
                "sigmoid",
                is_normalized=True,
                factor=c.positive_float("moe_router_scaling_factor", 1.0),
            ),
            stored=StoredExperts(is_stacked=True, is_apart=True),
            correction="router_bias",
            shared_width=c.positive("share_expert_dim", 1280),
        )
        return StepConfig.common(
            c,
            head_dim=windowed.dim,
            rotary_share=1.0,
            norm=partial(RMSNorm, offset=1.0),
            norm_eps=c.positive_float("rms_norm_eps", 1e-5),
            mlp_bias=c.bool("mlp_bias", False),
            qk_norms=head_norms,
            attention_gate="g_proj",
            has_head_gates=True,
            windows=windows,
            mixture=mixture,
            sparse=sparse_by_kind(c, 3),
            windowed_heads=windowed,
            limits=_limits(c, "swiglu_limits"),
            shared_limits=_limits(c, "swiglu_limits_shared"),
        )

    def __init__(self, c: StepConfig, mesh: Mesh) -> None:
        def mlp(layer: int) -> nn.Module:
            assert c.mixture is not None
            own = c
            if (limit := _of_layer(c.limits, layer)) is not None:
                own = replace(own, mixture=replace(c.mixture, activation="limited_swiglu", numbers=(limit,)))
            if (shared := _of_layer(c.shared_limits, layer)) is not None:
                own = replace(own, activation="limited_swiglu", activation_numbers=(shared,))
            return mlp_of(own, mesh, layer)

        super().__init__(c, mesh, mlp=mlp)


def _of_layer(limits: Sequence[float | None], layer: int) -> float | None:
    return limits[layer] if layer < len(limits) else None


def _limits(c: Checkpoint, name: str) -> tuple[float | None, ...]:
    """Return the limit of each layer; 0 and null stand for none. Raises CheckpointError."""
    count = c.positive("num_hidden_layers")
    if not c.values.get(name):
        return (None,) * count

    def fits(each: object) -> bool:
        return each is None or (isinstance(each, int | float) and (each == 0 or 0.3 <= each < 1e30))

    stated = c.listed(name, count, fits, f"for each of {count} layers a limit from 0.3 on, or 0 for none")
    return tuple(float(each) if each else None for each in stated)
