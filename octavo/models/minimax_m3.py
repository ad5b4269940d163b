"""MiniMax-M3: each query of most layers attends to the blocks of keys that it chooses.

Source: MiniMax's releases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.core.model_shape import Indexed, LayerCache
from octavo.distributed.mesh import Mesh
from octavo.layers.block_sparse import BlockSparseAttention
from octavo.layers.linear import joined_linear
from octavo.layers.norm import RMSNorm
from octavo.layers.picked import Pick, PickedLinear
from octavo.layers.rotary import Rotary
from octavo.models.blocks import GatedDecoder, head_norms, qkv_linear
from octavo.models.config import DecoderConfig, Mixer
from octavo.models.sparse import NUMBERED, has_tensor, read_mixture, sparse_by_kind
from octavo.ops.block_sparse import BlockChoice

_KINDS = ("full_attention", "minimax_m3_sparse")
"""Kinds of layers: those that see all tokens, and those that choose."""


@dataclass(frozen=True, kw_only=True)
class MiniMaxM3Config(DecoderConfig):
    """The keys of the choice are as large as those of attention, and there are as many heads of its queries."""

    choice: BlockChoice
    choosing: tuple[bool, ...]
    """For each layer whether its queries choose."""

    def mixer_of(self, layer: int) -> Mixer | None:
        return ChoosingAttention if self.choosing[layer] else None

    def caches_of(self, layer: int, mesh: Mesh) -> Sequence[LayerCache]:
        if not self.choosing[layer]:
            return super().caches_of(layer, mesh)
        heads, by = self.heads.share(mesh), self.choice
        return (LayerCache(Indexed(heads.kv, heads.dim, heads.dim, by.width * by.num_chosen)),)


class ChoosingAttention(nn.Module):
    """Grouped-query attention to chosen blocks. Queries and keys of the choice are normalised and turned, too."""

    def __init__(self, c: MiniMaxM3Config, mesh: Mesh, layer: int) -> None:
        super().__init__()
        assert c.rope is not None
        dim, (first, length) = c.heads.dim, c.heads.kv_share(mesh)
        self.qkv_proj = qkv_linear(c, mesh)
        # the queries of the choice are shared like the heads of keys that they choose for
        picks = [
            Pick("index_q_proj", c.heads.kv_size, (slice(first, first + length),)),
            Pick("index_k_proj", dim, (slice(0, dim),)),
        ]
        self.index_proj = PickedLinear(c.hidden_size, picks)
        self._norms, self._index_norms = (cast("tuple[RMSNorm, RMSNorm]", head_norms(c, mesh)) for _ in range(2))
        (self.q_norm, self.k_norm), (self.index_q_norm, self.index_k_norm) = self._norms, self._index_norms
        self.rope = Rotary(c.rope)
        self.attend = BlockSparseAttention(c.choice)
        self.o_proj = joined_linear(c.heads.q_size, c.hidden_size, mesh)

    def forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        q, k, v = self.qkv_proj(x)  # each [tokens, heads, dim]
        small = self.index_proj(x).view(len(x), -1, q.shape[2])  # queries, and behind them the key
        q, k = self.rope(q, k, batch, self._norms)
        queries, keys = self.rope(small[:, :-1], small[:, -1:], batch, self._index_norms)
        return self.o_proj(self.attend(q, k, v, (queries, keys.flatten(1)), batch))


class MiniMaxM3VLForCausalLM(GatedDecoder):
    """The text model. Mixtures beside a shared expert stand behind the first layers, all MLPs have clamped gates, and
    norms have an offset of one.
    """

    REPLACED = {
        ".block_sparse_moe.": ".mlp.",
        ".mlp.gate.e_score_correction_bias": ".mlp.e_score_correction_bias",
        ".self_attn.indexer.": ".self_attn.index_",
    }

    @classmethod
    def read(cls, c: Checkpoint) -> MiniMaxM3Config:
        c.expect_all(use_gemma_norm=True, use_qk_norm=True, use_routing_bias=True, use_sparse_attention=True)
        c.expect_all(qk_norm_type="per_head", scoring_func="sigmoid", sparse_score_type="max")
        c.expect_all(attention_output_gate=False, sparse_init_block=0, n_shared_experts=1, swiglu_beta=1.0)
        c.expect("hidden_act", "swigluoai", "silu")
        dim, layers = c.positive("head_dim", 128), c.positive("num_hidden_layers")
        # the small keys turn like the others, and each head of keys has its choice
        c.expect("index_head_dim", dim, default=128)
        c.expect("index_n_heads", c.positive("num_key_value_heads"), default=4)
        kinds = ["full_attention"] * layers
        if c.values.get("layer_types") is not None:
            expected = f'"{_KINDS[0]}" or "{_KINDS[1]}" for each of {layers} layers'
            kinds = c.listed("layer_types", layers, lambda each: each in _KINDS, expected)
        count, recent = c.positive("index_topk_blocks", 16), c.count("index_local_blocks", 1)
        if recent > count:
            raise c.error("index_local_blocks", f"at most index_topk_blocks, which is {count}")
        numbers = c.positive_float("swiglu_alpha", 1.702), c.positive_float("swiglu_limit", 7.0)
        joined = has_tensor(c, ".mlp.gate_up_proj.weight") or has_tensor(c, ".shared_experts.gate_up_proj.weight")
        return MiniMaxM3Config.common(
            c,
            head_dim=dim,
            rotary_share=1.0,
            intermediate_size=c.positive("dense_intermediate_size", 12288),
            norm=partial(RMSNorm, offset=1.0),
            qk_norms=head_norms,
            windows=(),
            activation="clamped_swiglu",
            activation_numbers=numbers,
            gate_up_reads=("gate_up_proj",) if joined else ("gate_proj", "up_proj"),
            mixture=read_mixture(
                c,
                NUMBERED,
                experts="num_local_experts",
                width="intermediate_size",
                score="sigmoid",
                factor=("routed_scaling_factor", 2.0),
                correction="e_score_correction_bias",
                activation="clamped_swiglu",
                numbers=numbers,
                shared_width=("shared_intermediate_size", 3072),
            ),
            sparse=sparse_by_kind(c, 0),
            choice=BlockChoice(dim**-0.5, c.positive("index_block_size", 128), count, recent),
            choosing=tuple(kind == _KINDS[1] for kind in kinds),
        )


MiniMaxM3SparseForConditionalGeneration = MiniMaxM3SparseForCausalLM = MiniMaxM3VLForCausalLM
