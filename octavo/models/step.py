"""Step 3: queries made of few elements, and one head of keys. Step 3.5 Flash: gated heads, of which layers with a
window have more, and SwiGLU that is clamped in some layers.

Sources: https://arxiv.org/abs/2507.19427, https://arxiv.org/abs/2602.10604.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.attention import PagedAttention
from octavo.layers.experts import StoredExperts
from octavo.layers.heads import Heads
from octavo.layers.linear import ColumnLinear, joined_linear
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import Rotary
from octavo.models.blocks import GatedDecoder, head_norms, mlp_of
from octavo.models.config import DecoderConfig, windows_by_kind
from octavo.models.fields import EPS, Read, fields
from octavo.models.sparse import read_mixture, sparse_by_kind

_STORED: Final = StoredExperts(is_stacked=True, is_apart=True)
_NAMES: Final = {
    ".share_expert.": ".mlp.shared_experts.",
    ".moe.gate.": ".mlp.gate.",
    ".moe.router_bias": ".mlp.router_bias",
    ".moe.": ".mlp.experts.",
}


@dataclass(frozen=True, kw_only=True)
class Step3Config(DecoderConfig):
    """Adds the width that queries are made from."""

    q_rank: int


class NarrowQueriesAttention(nn.Module):
    """Attention of heads that share one key and value; queries are made of `q_rank` elements behind a norm."""

    def __init__(self, c: Step3Config, mesh: Mesh, layer: int) -> None:
        super().__init__()
        assert c.rope is not None
        self._sections, own = [c.q_rank, c.heads.dim, c.heads.dim], c.heads.share(mesh)
        self._shape = own.query, own.dim
        reads = ["q_proj", "k_proj", "v_proj"]
        self.qkv_proj = ColumnLinear(c.hidden_size, self._sections, Mesh.single(), reads=reads)
        self.inter_norm = RMSNorm(c.q_rank, c.norm_eps)
        self.wq = ColumnLinear(c.q_rank, c.heads.q_size, mesh)
        self.rope, self.attend = Rotary(c.rope), PagedAttention(own)
        self.o_proj = joined_linear(c.heads.q_size, c.hidden_size, mesh)

    def forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        narrow, k, v = self.qkv_proj(x).split(self._sections, 1)
        q = self.wq(self.inter_norm(narrow.contiguous())).view(len(x), *self._shape)
        return self.o_proj(self.attend(q, k.unsqueeze(1), v.unsqueeze(1), batch, self.rope.rotation(batch)))


class Step3TextForCausalLM(GatedDecoder):
    """Step 3: experts are chosen by softmax, beside one that all tokens take."""

    COMMON = Step3Config.common
    REPLACED = _NAMES
    EXPECTED = fields(num_key_value_heads=1)
    FIELDS = fields(
        q_rank=Read(Checkpoint.positive, "share_q_dim", 2048),
        head_dim=Read(Checkpoint.positive, "head_dim", 256),
        rotary_share=1.0,
        norm_eps=EPS,
        attention=NarrowQueriesAttention,
        mixture=Read(
            read_mixture,
            experts=("n_routed_experts", 48),
            width=("moe_intermediate_size", 5120),
            top_k=("num_experts_per_tok", 3),
            is_normalized=("norm_expert_weight", False),
            stored=_STORED,
            shared_width=("share_expert_dim", 5120),
        ),
        sparse=Read(sparse_by_kind, 1),
    )


@dataclass(frozen=True, kw_only=True)
class StepConfig(DecoderConfig):
    """`heads` are those of layers that see all tokens; both kinds have as many heads of keys."""

    windowed_heads: Heads
    limits: tuple[float | None, ...]
    """For each layer the limit of SwiGLU in its experts, None for none; a prediction layer behind them has none."""
    shared_limits: tuple[float | None, ...]
    """For each layer the limit of SwiGLU in the MLP or the expert that all tokens take."""

    def heads_of(self, layer: int) -> Heads:
        return self.heads if self.window_of(layer) is None else self.windowed_heads


class Step3p5ForCausalLM(GatedDecoder):
    """The text model of Step 3.7 Flash, too. Mixtures are those of DeepSeek V3."""

    REPLACED = _NAMES

    @classmethod
    def read(cls, c: Checkpoint) -> StepConfig:
        c.expect_all(norm_expert_weight=True, use_head_wise_attn_gate=True, use_moe_router_bias=True, use_qk_norm=True)
        c.expect_all(zero_centered=True, attention_bias=False, moe_router_activation="sigmoid")
        windows = windows_by_kind(c)
        kv, query = c.positive("num_key_value_heads", 8), c.positive("num_attention_heads")
        windowed = Heads(c.positive("num_sliding_attention_heads", query), kv, c.positive("head_dim", 128))
        if windowed.query % kv:
            raise c.error("num_sliding_attention_heads", f"a multiple of the key and value heads, which are {kv}")
        mixture = read_mixture(
            c,
            experts=("n_routed_experts", 288),
            width=("moe_intermediate_size", 1280),
            top_k=("num_experts_per_tok", 8),
            score="sigmoid",
            factor=("moe_router_scaling_factor", 1.0),
            stored=_STORED,
            correction="router_bias",
            shared_width=("share_expert_dim", 1280),
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
