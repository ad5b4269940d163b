"""The blocks of decoders: attention over rotated heads, MLPs, and layers that place norms around both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.attention import PagedAttention, PromptAttention, SinkAttention, SpanAttention
from octavo.layers.distance import SlopeAttention
from octavo.layers.elementwise import Elementwise, activation, addition
from octavo.layers.experts import Experts, IdleExperts, OutputBias, WeightedInputs
from octavo.layers.linear import ColumnLinear, GatedLinear, QKVLinear, joined_linear
from octavo.layers.norm import HeadLayerNorm, Norm, RMSNorm, UnscaledRMSNorm, WidthNorm
from octavo.layers.picked import GatedQKVLinear, GroupedQKVLinear
from octavo.layers.rotary import Rotary
from octavo.layers.routers import ExactLinear, Router
from octavo.models.config import DecoderConfig, NormPair
from octavo.models.decoder import DecoderStack
from octavo.models.fields import read_fields
from octavo.models.sparse import Mixture


def stream_norm(c: DecoderConfig) -> Norm:
    """Make a norm of the stream."""
    return c.norm(c.hidden_size, c.norm_eps)


def head_norms(c: DecoderConfig, mesh: Mesh) -> NormPair:
    """Make norms of single heads, which share a weight."""
    return c.norm(c.heads.dim, c.norm_eps), c.norm(c.heads.dim, c.norm_eps)


def unscaled_head_norms(c: DecoderConfig, mesh: Mesh) -> NormPair:
    """Make norms of single heads without weights."""
    return UnscaledRMSNorm(c.heads.dim, c.norm_eps), UnscaledRMSNorm(c.heads.dim, c.norm_eps)


def width_norms(c: DecoderConfig, mesh: Mesh) -> NormPair:
    """Make norms over all heads of a token together."""
    heads, make = c.heads, partial(WidthNorm, dim=c.heads.dim, eps=c.norm_eps, mesh=mesh)
    return make(heads.query, share=heads.query_share(mesh)), make(heads.kv, share=heads.kv_share(mesh))


def head_layer_norms(c: DecoderConfig, mesh: Mesh, *, is_apart: bool = False) -> NormPair:
    """Make norms with a weight for each head."""

    def make(count: int, share: tuple[int, int]) -> Norm:
        start, length = (each // c.heads.dim for each in share)
        return HeadLayerNorm(count, range(start, start + length), c.heads.dim, c.norm_eps, is_apart=is_apart)

    return make(c.heads.query, c.heads.query_share(mesh)), make(c.heads.kv, c.heads.kv_share(mesh))


def qkv_linear(c: DecoderConfig, mesh: Mesh) -> QKVLinear | GatedQKVLinear | GroupedQKVLinear:
    """Make the projection to queries, keys and values, and to gates where the config says so."""
    if c.attention_gate:
        return GatedQKVLinear(
            c.hidden_size, c.heads, mesh, bias=c.qkv_bias, gate=c.attention_gate, by_head=c.has_head_gates
        )
    if c.is_qkv_grouped:
        return GroupedQKVLinear(
            *(c.hidden_size, c.heads, mesh), reads=c.qkv_reads, bias=c.qkv_bias, shards=c.qkv_shards
        )
    return QKVLinear(
        c.hidden_size,
        c.heads,
        mesh,
        bias=c.qkv_bias,
        reads=c.qkv_reads,
        transposed=c.is_transposed,
        unbiased=c.qkv_unbiased,
    )


class RotaryAttention(nn.Module):
    """Grouped-query attention, with the rotation and over the window that the config has for the layer.

    Queries and keys are normalised where the config has `qk_norms`, before they turn or after it.
    """

    def __init__(self, c: DecoderConfig, mesh: Mesh, layer: int) -> None:
        super().__init__()
        if c.heads_of(layer) != c.heads:
            c = replace(c, heads=c.heads_of(layer))
        self.qkv_proj = qkv_linear(c, mesh)
        self.gate = Elementwise(c.gate_operator) if c.attention_gate else None
        norms = None if c.qk_norms is None else c.qk_norms(c, mesh)
        if norms is not None:
            self.q_norm, self.k_norm = norms
        rope = c.rope_of(layer)
        self.rope = None if rope is None else Rotary(rope)
        # norms of single heads are one operator with the rotation
        is_fused = rope is not None and norms is not None and type(norms[0]) is RMSNorm and not c.are_norms_last
        self._norms_apart: NormPair | None = None if is_fused else norms
        self._is_normed_last = norms is not None and c.are_norms_last
        self._norms_within = cast("tuple[RMSNorm, RMSNorm]", norms) if is_fused else None
        self.clip = None if c.qkv_limit is None else Elementwise("clamped", c.qkv_limit)
        heads, window = self.qkv_proj.local_heads, c.window_of(layer)
        self.attend: PagedAttention = (
            SinkAttention(c.heads, mesh, c.ahead_of(layer), scale=c.attention_scale, sliding_window=window)
            if c.has_sinks
            else SlopeAttention(c.heads, mesh, c.slopes, c.attention_scale)
            if c.slopes
            else (PromptAttention if c.has_whole_prompts else SpanAttention if c.has_whole_spans else PagedAttention)(
                *(heads, c.ahead_of(layer)),
                scale=c.attention_scale,
                sliding_window=window,
                soft_cap=c.attention_soft_cap,
            )
        )
        self.o_proj = joined_linear(c.heads.q_size, c.hidden_size, mesh, bias=c.out_bias, transposed=c.is_transposed)

    def forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        return self.o_proj(self.attended(x, batch))

    def attended(self, x: Tensor, batch: ModelInput) -> Tensor:
        """Return the attention's results by head, before heads are joined: x [tokens, hidden] → [tokens, heads ·
        dim]."""
        q, k, v, *gates = self.qkv_proj(x)  # each [tokens, heads, dim]
        if self.clip is not None:
            q, k, v = (self.clip(each.flatten(1)).view(each.shape) for each in (q, k, v))
        rotation = None
        if self.rope is not None:
            if self._is_normed_last:
                q, k = self.rope(q, k, batch)
            else:
                rotation = self.rope.rotation(batch, self._norms_within)
        if self._norms_apart is not None:
            q, k = self._norms_apart[0](q), self._norms_apart[1](k)
        attended = self.attend(q, k, v, batch, rotation)
        return attended if self.gate is None else self.gate(attended, gates[0].flatten(1))


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`, or with the config's activation of the gate."""

    def __init__(self, c: DecoderConfig, mesh: Mesh) -> None:
        super().__init__()
        width = c.intermediate_size
        self.gate_up_proj = GatedLinear(
            *(c.hidden_size, width, mesh),
            bias=c.mlp_bias,
            reads=c.gate_up_reads,
            activation=c.activation,
            numbers=c.activation_numbers,
        )
        self.down_proj = joined_linear(c.intermediate_size, c.hidden_size, mesh, bias=c.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        return self.down_proj(self.gate_up_proj(x))


class PlainMLP(nn.Module):
    """`down(act(up(x)))` with the config's activation."""

    def __init__(self, c: DecoderConfig, mesh: Mesh) -> None:
        super().__init__()
        width, is_transposed = c.intermediate_size, c.is_transposed
        self.up_proj = ColumnLinear(c.hidden_size, width, mesh, bias=c.mlp_bias, transposed=is_transposed)
        self.act = activation(c.activation)
        self.down_proj = joined_linear(width, c.hidden_size, mesh, bias=c.mlp_bias, transposed=is_transposed)

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        return self.down_proj(self.act(self.up_proj(x)))


class SparseMLP(nn.Module):
    """Σ weight · expert(x) over the experts that the router chooses, plus the shared expert's output."""

    def __init__(self, c: DecoderConfig, mixture: Mixture, mesh: Mesh) -> None:
        super().__init__()
        m = mixture
        self.gate = Router(
            *(c.hidden_size, m.experts + m.idle, m.rule),
            bias=m.router_bias,
            correction=m.correction,
            is_correction_row=m.is_correction_row,
        )
        self.experts = Experts(
            *(m.latent_width or c.hidden_size, m.width, m.experts, mesh),
            stored=m.stored,
            bias=m.bias,
            activation=m.activation,
            numbers=m.numbers,
        )
        shared = GatedMLP if m.stored.gate is not None else PlainMLP
        own = replace(c, intermediate_size=m.shared_width)
        self.shared_experts = shared(own, mesh) if m.shared_width else None
        self.shared_expert_gate = ExactLinear(c.hidden_size, 1) if m.is_shared_gated else None
        self.fc1_latent_proj = self.latent_norm = None
        if m.latent_width:
            # narrow: whole on every rank
            sizes, single = (c.hidden_size, m.latent_width), Mesh.single()
            self.fc1_latent_proj = ColumnLinear(*sizes, single, bias=c.mlp_bias)
            self.fc2_latent_proj = ColumnLinear(*sizes[::-1], single, bias=c.mlp_bias)
            self.latent_norm = RMSNorm(m.latent_width, c.norm_eps) if m.has_latent_norm else None
            self.add = addition()
        self.weigh = WeightedInputs() if m.are_inputs_weighted else None
        self.idle = IdleExperts(m.experts) if m.idle else None
        self.factor = None if m.output_factor == 1 else Elementwise("scaled", m.output_factor)
        self.out_bias = OutputBias(c.hidden_size) if m.has_output_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        shared = None if self.shared_experts is None else self.shared_experts(x)
        gate = None if self.shared_expert_gate is None else self.shared_expert_gate(x)
        routing = self.gate(x)
        if self.weigh is not None:
            x, routing = self.weigh(x, routing)
        if self.fc1_latent_proj is None:
            out: Tensor = self.experts(x, routing, shared, gate)
            if self.idle is not None:
                out = self.idle(out, x, routing)
            if self.out_bias is not None:
                out = self.out_bias(out)
            return out if self.factor is None else self.factor(out)
        out = self.experts(self.fc1_latent_proj(x), routing)
        out = self.fc2_latent_proj(out if self.latent_norm is None else self.latent_norm(out))
        return out if shared is None else self.add(out, shared)


class GatedLayer(nn.Module):
    """Attention and MLP, each behind a norm; the residual stream is carried beside x."""

    def __init__(self, c: DecoderConfig, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = stream_norm(c)
        self.self_attn = attention
        self.post_attention_layernorm = stream_norm(c)
        self.mlp = mlp

    def forward(self, x: Tensor, residual: Tensor | None, batch: ModelInput) -> tuple[Tensor, Tensor]:
        """Return (x, residual), each [tokens, hidden]; the stream is their sum."""
        x, residual = self.input_layernorm.add(x, residual)
        x, residual = self.post_attention_layernorm.add(self.self_attn(x, batch), residual)
        return self.mlp(x), residual


class SandwichLayer(GatedLayer):
    """Attention and MLP, each behind a norm and before a module that `after` makes, a second norm unless given."""

    def __init__(
        self,
        c: DecoderConfig,
        attention: nn.Module,
        mlp: nn.Module,
        after: Callable[[DecoderConfig], nn.Module] = stream_norm,
    ) -> None:
        super().__init__(c, attention, mlp)
        self.attention_output_norm, self.mlp_output_norm = after(c), after(c)

    def forward(self, x: Tensor, residual: Tensor | None, batch: ModelInput) -> tuple[Tensor, Tensor]:
        """Return (x, residual), each [tokens, hidden]; the stream is their sum."""
        x, residual = self.input_layernorm.add(x, residual)
        x = self.attention_output_norm(self.self_attn(x, batch))
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp_output_norm(self.feed_forward(x, residual)), residual

    def feed_forward(self, x: Tensor, stream: Tensor) -> Tensor:
        """x [tokens, hidden], the normalised stream, → [tokens, hidden]."""
        return self.mlp(x)


class LateNormLayer(nn.Module):
    """Attention and MLP, each before a norm whose result joins the stream. `carries_residual` is False."""

    def __init__(self, c: DecoderConfig, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.self_attn = attention
        self.attention_output_norm = stream_norm(c)
        self.mlp = mlp
        self.mlp_output_norm = stream_norm(c)
        self.add = addition()

    def forward(self, x: Tensor, residual: None, batch: ModelInput) -> tuple[Tensor, None]:
        """Return (the stream [tokens, hidden], None)."""
        x = self.add(x, self.attention_output_norm(self.self_attn(x, batch)))
        return self.add(x, self.mlp_output_norm(self.mlp(x))), None


class LateNormOfSumLayer(nn.Module):
    """Attention and MLP, each added to the stream before a norm of the sum. `carries_residual` is False."""

    def __init__(self, c: DecoderConfig, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.self_attn, self.mlp = attention, mlp
        self.input_layernorm, self.post_attention_layernorm = stream_norm(c), stream_norm(c)

    def forward(self, x: Tensor, residual: None, batch: ModelInput) -> tuple[Tensor, None]:
        """Return (the stream [tokens, hidden], None)."""
        x, _ = self.input_layernorm.add(self.self_attn(x, batch), x)
        x, _ = self.post_attention_layernorm.add(self.mlp(x), x)
        return x, None


class ParallelLayer(nn.Module):
    """Attention and MLP read the same stream, behind one norm or behind one each."""

    def __init__(self, c: DecoderConfig, attention: nn.Module, mlp: nn.Module, *, has_two_norms: bool = False) -> None:
        super().__init__()
        self.input_layernorm = stream_norm(c)
        self.post_attention_layernorm = stream_norm(c) if has_two_norms else None
        self.self_attn, self.mlp = attention, mlp
        self.add = addition()

    def forward(self, x: Tensor, residual: Tensor | None, batch: ModelInput) -> tuple[Tensor, Tensor]:
        """Return (x, residual), each [tokens, hidden]; the stream is their sum."""
        x, residual = self.input_layernorm.add(x, residual)
        other = x if self.post_attention_layernorm is None else self.post_attention_layernorm(residual)
        return self.add(self.self_attn(x, batch), self.mlp(other)), residual


def attention_of(c: DecoderConfig, mesh: Mesh, layer: int) -> nn.Module:
    """Make the attention of a layer, or what stands in its place."""
    return (c.mixer_of(layer) or RotaryAttention)(c, mesh, layer)


def mlp_of(c: DecoderConfig, mesh: Mesh, layer: int) -> nn.Module:
    """Make the MLP of a layer: a mixture of experts where the config has one."""
    if c.mixture is not None and (not c.sparse or c.sparse[layer]):
        return SparseMLP(c, c.mixture, mesh)
    return (c.mlp or GatedMLP)(c, mesh)


class GatedDecoder(DecoderStack):
    """A stack of decoder layers; `attention` and `mlp` make the modules of the layer with a given index.

    Its config is what `COMMON` reads beside the `FIELDS` (`models.fields`) of a family, where the config.json has the
    values that are `EXPECTED`, or lacks their keys, and has nothing under those that are `REFUSED`, by the reason.
    """

    COMMON: ClassVar[Callable[..., Any]] = DecoderConfig.common
    FIELDS: ClassVar[Mapping[str, Any]] = {}
    EXPECTED: ClassVar[Mapping[str, Any]] = {}
    REFUSED: ClassVar[Mapping[str, Sequence[str]]] = {}

    @classmethod
    def read(cls, c: Checkpoint) -> Any:
        for reason, names in cls.REFUSED.items():
            c.refuse(*names, because=reason)
        c.expect_all(**cls.EXPECTED)
        return cls.COMMON(c, **read_fields(c, cls.FIELDS))

    def __init__(
        self,
        c: DecoderConfig,
        mesh: Mesh,
        attention: Callable[[int], nn.Module] | None = None,
        mlp: Callable[[int], nn.Module] | None = None,
        embedding_size: int | None = None,
    ) -> None:
        """attention, mlp: what the config has in every layer, unless given."""
        attention = attention or (lambda index: attention_of(c, mesh, index))
        mlp = mlp or (lambda index: mlp_of(c, mesh, index))
        layer = c.layer or GatedLayer
        super().__init__(
            c, mesh, lambda index: layer(c, attention(index), mlp(index)), norm=c.norm, embedding_size=embedding_size
        )
