"""Inkling, its text model: scores have learned profiles of distances in the place of rotations, keys, values and the
stream have short convolutions, and experts that all tokens take are scored with the others.

Source: Thinking Machines' releases.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.attention.metadata import AttentionMetadata, ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.core.model_shape import Indexed, LayerCache, State
from octavo.distributed.mesh import Mesh
from octavo.layers.elementwise import StoredFactor, addition
from octavo.layers.embedding import LMHead
from octavo.layers.experts import Experts, StoredExperts
from octavo.layers.heads import Heads
from octavo.layers.layer import Binding, CachedLayer, TensorSlot
from octavo.layers.linear import HeadsLinear, InterleavedLinear, QKVLinear, joined_linear
from octavo.layers.norm import RMSNorm
from octavo.layers.recurrent import RecurrentLayer, ShortConvolution
from octavo.layers.routers import Router
from octavo.models.blocks import GatedDecoder, GatedLayer, GatedMLP, head_norms
from octavo.models.config import DecoderConfig
from octavo.models.fields import UNRELEASED
from octavo.models.sparse import Mixture, read_mixture, sparse_by_kind

_KINDS: Final = ("hybrid", "hybrid_sliding")
_ALWAYS: Final = 1e4
"""The score of an expert that all tokens take: more than any other."""


@dataclass(frozen=True, kw_only=True)
class InklingConfig(DecoderConfig):
    """windowed: heads of layers with a window. rank, extent: of profiles. growth: the position from which queries of
    other layers grow, and the factor. num_drawn: tokens with logits."""

    windowed: Heads
    rank: int
    extent: int
    taps: int
    growth: tuple[int, float] | None
    num_shared: int
    num_drawn: int
    mixture: Mixture

    def heads_of(self, layer: int) -> Heads:
        return self.windowed if self.window_of(layer) else self.heads

    def caches_of(self, layer: int, mesh: Mesh) -> Sequence[LayerCache]:
        heads, window = self.heads_of(layer).share(mesh), self.window_of(layer)
        tails = State((self.taps - 1) * 2 * (heads.kv * heads.dim + self.hidden_size))
        return LayerCache(Indexed(heads.kv, heads.dim, 0, window or 0), window), LayerCache(tails)


class AddedConvolution(ShortConvolution):
    """Adds to x [tokens, channels] its causal convolution."""

    def __init__(self, channels: int, own: Sequence[slice], taps: int, **named: Any) -> None:
        super().__init__(channels, own, taps, bias=False, **named)
        self.add = addition()

    def smooth(self, x: Tensor, states: Tensor, rows: AttentionMetadata) -> Tensor:
        """Return [tokens, channels]. states: those of the operator."""
        ones = torch.ones_like(x)  # with gates there is no activation
        return self.add(x, self(x, states, rows, (ones, ones)))


class ProfiledScores(CachedLayer):
    """Stores keys and values, and attends with the profiles `proj`."""

    def __init__(self, c: InklingConfig, layer: int) -> None:
        super().__init__()
        self._window = window = c.window_of(layer)
        self._scale, self._growth = 1 / c.heads_of(layer).dim, None if window else c.growth
        self.proj = nn.Parameter(torch.empty(c.rank, window or c.extent), requires_grad=False)

    def bind(self, binding: Binding) -> None:
        super().bind(binding)
        if self._growth is not None:
            made = binding.once("growth", partial(_growth, *self._growth, binding.max_positions))
            self._factors = made.to(binding.device)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, factors: Tensor, batch: ModelInput) -> Tensor:
        """q [tokens, heads, dim], k and v [tokens, kv_heads, dim], factors [tokens, heads, rank] → [tokens, heads ·
        dim]."""
        if self._growth is not None:
            growth = self._factors[batch.positions][:, None, None]
            q, factors = (q.float() * growth).to(q.dtype), (factors.float() * growth).to(q.dtype)
        cache, rows = batch.kv_caches[self.cache_index][0], batch.attention[self.cache_group]
        profiled = factors, self.proj
        return self.ops.relative_attention(q, (k, v), profiled, cache, rows, self._scale, self._window).flatten(1)


def _growth(floor: int, alpha: float, count: int) -> Tensor:
    return 1.0 + alpha * torch.log((torch.arange(1, count + 1).float() / floor).clamp(min=1.0))


class InklingAttention(nn.Module):
    """Grouped-query attention; keys and values are convolved before the norms of heads."""

    def __init__(self, c: InklingConfig, mesh: Mesh, layer: int) -> None:
        super().__init__()
        heads = c.heads_of(layer)
        self.qkv_proj = QKVLinear(c.hidden_size, heads, mesh, reads=("wq_du", "wk_dv", "wv_dv"))
        self.factors = HeadsLinear(c.hidden_size, Heads(heads.query, heads.query, c.rank), mesh, reads=("wr_du",))
        size, (first, length) = heads.kv_size, heads.kv_share(mesh)
        own = [slice(begin, begin + length) for begin in (first, size + first)]
        self.kv_sconv = AddedConvolution(2 * size, own, c.taps, reads={"k_sconv": size, "v_sconv": size})
        self.q_norm, self.k_norm = head_norms(replace(c, heads=heads), mesh)
        self.rel_logits_proj = ProfiledScores(c, layer)
        self.o_proj = joined_linear(heads.q_size, c.hidden_size, mesh)

    def forward(self, x: Tensor, batch: ModelInput, states: Tensor, rows: AttentionMetadata) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]. states: of the convolution."""
        q, k, v = self.qkv_proj(x)
        both = self.kv_sconv.smooth(torch.cat((k.flatten(1), v.flatten(1)), 1), states, rows)
        k, v = (each.reshape(k.shape) for each in both.chunk(2, 1))
        return self.o_proj(self.rel_logits_proj(self.q_norm(q), self.k_norm(k), v, *self.factors(x), batch))


class InklingLayer(GatedLayer):
    """Attention and MLP, each behind a norm and before a convolution. One state has the tails of all convolutions."""

    def __init__(self, c: InklingConfig, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__(c, attention, mlp)
        self.tails, width = RecurrentLayer((), 0, slice(0, 0)), c.hidden_size
        self.attn_sconv, self.mlp_sconv = (AddedConvolution(width, [slice(0, width)], c.taps) for _ in range(2))
        self._size = (c.taps - 1) * width

    def forward(self, x: Tensor, residual: Tensor | None, batch: ModelInput) -> tuple[Tensor, Tensor]:
        states, rows = self.tails.states(batch)
        inner, second, third = states.tensor_split((-2 * self._size, -self._size), dim=1)
        x, residual = self.input_layernorm.add(x, residual)
        x = self.attn_sconv.smooth(self.self_attn(x, batch, inner, rows), second, rows)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp_sconv.smooth(self.mlp(x), third, rows), residual


class ScaledMLP(GatedMLP):
    """A gated MLP times a stored number. Rows of the stored gate and of `up` alternate."""

    def __init__(self, c: InklingConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh)
        self.gate_up_proj = InterleavedLinear(c.hidden_size, c.intermediate_size, mesh, reads=())
        self.global_scale = StoredFactor(c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.global_scale(super().forward(x))


class AllExperts(Experts):
    """Experts, the last `num_shared` of which are stored beside those of the others."""

    def __init__(self, c: InklingConfig, mesh: Mesh) -> None:
        m = c.mixture
        super().__init__(c.hidden_size, m.width, m.experts, mesh, stored=m.stored)
        self._num_routed = m.experts - c.num_shared

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        (inputs, width, count), (own, length) = self._sizes, self._owned
        shared, shapes = f"{path.rpartition('.')[0]}.shared_experts.shared_w", ((2 * width, inputs), (inputs, width))
        for stack, number, shape in zip(self._stacks, ("13", "2"), shapes, strict=True):
            for before, first, end in ((f"{path}.w", 0, self._num_routed), (shared, self._num_routed, count)):
                experts, name = range(max(own, first), min(own + length, end)), f"{before}{number}_weight"
                part = slice(experts.start - first, max(experts.start, experts.stop) - first)
                fill = partial(self._fill_from, stack, name, first, experts)
                yield TensorSlot(name, (end - first, *shape), fill, parts=((part,),))

    def _fill_from(self, stack: Any, name: str, first: int, experts: range, stored: Tensor) -> None:
        for expert in experts:
            for piece, rows in self._pieces(stack.pieces, stored[expert - first]):
                self._fill(name, stack, expert, piece, "weight", rows)


class SinkRouter(Router):
    """A router that always chooses the last `num_shared` experts, too, and weighs all that it chooses together."""

    def __init__(self, c: InklingConfig) -> None:
        m = c.mixture
        super().__init__(c.hidden_size, m.experts, m.rule, correction="gate.bias", factors="gate.global_scale")
        self._shapes = {"correction": (m.experts - c.num_shared,), "factors": (1,)}

    def _fill_beside(self, own: str, name: str, stored: Tensor) -> None:
        lacking = self._experts - len(stored)
        wide = (
            F.pad(stored.float(), (0, lacking), value=_ALWAYS) if own == "correction" else stored.expand(self._experts)
        )
        super()._fill_beside(own, name, wide)


class SinkMLP(nn.Module):
    """The weighted sum of the experts that the router chooses."""

    def __init__(self, c: InklingConfig, mesh: Mesh) -> None:
        super().__init__()
        self.gate, self.experts = SinkRouter(c), AllExperts(c, mesh)

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        return self.experts(x, self.gate(x))


class InklingForConditionalGeneration(GatedDecoder):
    """The whole text model."""

    PREFIXES = ("model.llm.", "model.")
    RENAMED = {
        "embed_tokens": "embed",
        "lm_head": "unembed",
        "self_attn": "attn",
        "o_proj": "wo_ud",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "mlp_norm",
        "gate_up_proj": "w13_dn",
        "down_proj": "w2_md",
    }
    IGNORED = (*GatedDecoder.IGNORED, r"(?:audio|visual|mtp)\..*")
    EXPECTED = {
        **dict.fromkeys(("q_bias", "o_bias", "tie_word_embeddings"), False),
        **dict.fromkeys(("use_embed_norm", "use_sconv", "use_gate_bias", "use_global_scale"), True),
        **dict.fromkeys(("norm_after_topk", "shared_expert_sink", "inference_moe_w13_interleaved"), True),
        "gate_activation": "sigmoid",
        "shared_experts_size": 1,
    }
    config: InklingConfig

    @classmethod
    def read(cls, c: Checkpoint) -> InklingConfig:
        c.expect_all(**cls.EXPECTED)
        c.refuse("final_logit_softcapping", because=UNRELEASED)
        count = c.positive("swa_num_attention_heads", 64)
        kv_heads = c.divisor("swa_num_key_value_heads", "swa_num_attention_heads", count, 16)
        windowed, dim = Heads(count, kv_heads, c.positive("swa_head_dim", 128)), c.positive("head_dim", 128)
        c.expect_all(v_head_dim=dim, swa_v_head_dim=windowed.dim)
        dense, floor = (c.optional_positive(name) for name in ("dense_intermediate_size", "log_scaling_n_floor"))
        shared, total = c.positive("n_shared_experts", 2), c.positive("vocab_size")
        routed, chosen = c.positive("n_routed_experts", 256), c.positive("num_experts_per_tok", 6)
        if chosen > routed:
            raise c.error("num_experts_per_tok", f"at most n_routed_experts, which is {routed}")
        mixture = read_mixture(
            c,
            experts=routed + shared,
            width="intermediate_size" if dense else ("moe_intermediate_size", 3072),
            top_k=chosen + shared,
            score="sigmoid",
            factor=("route_scale", 8.0),
            stored=StoredExperts(is_stacked=True, is_interleaved=True),
        )
        if (drawn := c.optional_positive("unpadded_vocab_size") or total) > total:
            raise c.error("unpadded_vocab_size", f"at most vocab_size, which is {total:,}")
        return InklingConfig.common(
            c,
            head_dim=dim,
            intermediate_size=dense or c.positive("intermediate_size"),
            rope=None,
            windows=_windows(c),
            qk_norms=head_norms,
            embedding_norm=RMSNorm,
            logit_multiplier=1 / c.positive_float("logits_mup_width_multiplier", 24.0),
            layer=InklingLayer,
            attention=InklingAttention,
            mixture=mixture,
            sparse=sparse_by_kind(c, 0),
            windowed=windowed,
            rank=c.positive("d_rel", 16),
            extent=c.positive("rel_extent", 1024),
            taps=c.positive("conv_kernel_size", 4),
            growth=None if floor is None else (floor, c.float("log_scaling_alpha", 0.1)),
            num_shared=shared,
            num_drawn=drawn,
        )

    def __init__(self, c: InklingConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh, mlp=lambda layer: (SinkMLP if c.sparse[layer] else ScaledMLP)(c, mesh))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits = super().compute_logits(hidden)
        assert isinstance(self.lm_head, LMHead), "only the last stage has the head"
        logits[:, max(0, self.config.num_drawn - self.lm_head.share.start) :] = torch.finfo(logits.dtype).min
        return logits


def _windows(c: Checkpoint) -> tuple[int | None, ...]:
    """Return the window of each layer, by `layer_types` or `local_layer_ids`. Raises CheckpointError."""
    count, window, local = c.positive("num_hidden_layers"), c.positive("sliding_window_size", 512), "local_layer_ids"
    if c.values.get("layer_types") is not None:
        expected = f'"{_KINDS[0]}" or "{_KINDS[1]}" for each of {count} layers'
        kinds = c.listed("layer_types", count, lambda each: each in _KINDS, expected)
        return tuple(window if kind == _KINDS[1] else None for kind in kinds)
    ids = c.values.get(local)
    if not isinstance(ids, list) or not all(type(each) is int and 0 <= each < count for each in ids):
        raise c.error(local, f"numbers of the {count} layers")
    return tuple(window if layer in ids else None for layer in range(count))
