"""Gemma 4: layers without a window have wider heads, values may be keys, late layers read the keys of earlier ones,
each layer may receive an embedding of its own, and may have a mixture of experts beside its MLP. Source: the release of
Gemma 4 (https://ai.google.dev/gemma). Of checkpoints that read images or sound, the text model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.core.model_shape import KeysAndValues, LayerCache
from octavo.distributed.mesh import Mesh
from octavo.errors import ConfigError, UnsupportedModel
from octavo.layers.attention import PagedAttention, SpanAttention
from octavo.layers.elementwise import Elementwise, RoundedFactor, StoredFactor, activation, addition
from octavo.layers.embedding import Embedding
from octavo.layers.experts import Experts, Router, StoredExperts
from octavo.layers.heads import Heads
from octavo.layers.layer import TensorSlot
from octavo.layers.linear import ColumnLinear, QKVLinear, joined_linear
from octavo.layers.norm import RMSNorm, UnscaledRMSNorm
from octavo.layers.rotary import Rotary
from octavo.models.blocks import GatedMLP, SandwichLayer, stream_norm
from octavo.models.config import KINDS, read_windows
from octavo.models.decoder import DecoderStack
from octavo.models.gemma_parts import BETWEEN_NORMS, GELU, GemmaConfig, read_cap
from octavo.models.ropes import read_rope
from octavo.models.sparse import Mixture
from octavo.ops.experts import RouterRule, Routing


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(GemmaConfig):
    """`heads` are those of layers with a window; `mixture` stands beside the MLP of each layer."""

    wide_heads: Heads
    """The heads of the other layers."""
    has_values: bool
    """Whether layers without a window project values; else keys are values."""
    num_sharing: int
    """How many of the last layers read the keys and values of the last layer of their kind before them."""
    doubles_width: bool
    """Whether the MLPs of those layers are twice as wide."""
    input_size: int
    """The width of each layer's own embedding; 0 where layers have none."""
    input_vocab_size: int
    """Rows of the table of those embeddings."""
    padding_id: int
    """The token that stands in the place of images where the embeddings of layers are looked up."""

    def heads_of(self, layer: int) -> Heads:
        """Return the heads of a layer."""
        return self.wide_heads if self.window_of(layer) is None else self.heads

    def writer_of(self, layer: int) -> int | None:
        """Return the layer whose keys and values a layer reads; None where it has its own."""
        own = self.num_layers - self.num_sharing
        same = [each for each in range(own) if self.window_of(each) == self.window_of(layer)]
        return None if layer < own else same[-1]

    def caches_of(self, layer: int, mesh: Mesh) -> Sequence[LayerCache]:
        """Return the cache of a layer that has keys and values of its own."""
        if self.writer_of(layer) is not None:
            return ()
        heads = self.heads_of(layer).share(mesh)
        return (LayerCache(KeysAndValues(heads.kv, heads.dim), self.window_of(layer)),)


def _read_mixture(c: Checkpoint) -> Mixture:
    experts, top_k = c.positive("num_experts"), c.positive("top_k_experts")
    if top_k > experts:
        raise c.error("top_k_experts", f"at most num_experts, which is {experts}")
    return Mixture(
        experts=experts,
        width=c.positive("moe_intermediate_size"),
        rule=RouterRule(top_k, is_normalized=True),
        stored=StoredExperts(is_stacked=True),
        activation=GELU,
    )


def _read_heads(c: Checkpoint, windows: Sequence[int | None], has_values: bool) -> tuple[Heads, Heads]:
    """Return the heads of layers with and without a window. Raises UnsupportedModel or CheckpointError.

    Configs state those without one by `global_head_dim`, or layer by layer in `per_layer_config`.
    """
    query, kv = c.positive("num_attention_heads"), c.positive("num_key_value_heads")
    heads = Heads(query, kv, c.positive("head_dim", 256))
    overrides = c.section("per_layer_config")
    if overrides is None:
        own_kv = None if has_values else c.optional_positive("num_global_key_value_heads")
        wide = Heads(query, own_kv or kv, c.positive("global_head_dim", 512))
    else:
        full = [str(layer) for layer, window in enumerate(windows) if window is None]
        sections = [section for layer in full if (section := overrides.section(layer)) is not None]
        stated = {(each.positive("num_key_value_heads", kv), each.positive("head_dim", heads.dim)) for each in sections}
        stated = stated or {(kv, heads.dim)}
        if set(overrides.values) not in (set(), set(full)) or len(stated) != 1:
            raise UnsupportedModel(
                f"{c.where}: per_layer_config differs for other layers than those without a window, which are "
                f"{', '.join(full)}; this variant of the model is not implemented"
            )
        wide = Heads(query, *stated.pop())
    for each in (heads, wide):
        if query % each.kv:
            raise c.error("num_attention_heads", f"a multiple of the key and value heads, which are {each.kv}")
    return heads, wide


class Attention(nn.Module):
    """Attention whose queries, keys and values are normalised head by head, the values without a weight."""

    def __init__(self, c: Gemma4Config, mesh: Mesh, layer: int) -> None:
        super().__init__()
        heads, writer, window, rope = c.heads_of(layer), c.writer_of(layer), c.window_of(layer), c.rope_of(layer)
        assert rope is not None
        self._heads = heads.share(mesh)
        self.q_norm = RMSNorm(heads.dim, c.norm_eps)
        if writer is None:
            names = ("q_proj", "k_proj", "v_proj")[: 3 if c.has_values or window is not None else 2]
            self.qkv_proj = QKVLinear(c.hidden_size, heads, mesh, bias=c.qkv_bias, reads=names)
            self.k_norm, self.v_norm = RMSNorm(heads.dim, c.norm_eps), UnscaledRMSNorm(heads.dim, c.norm_eps)
        else:
            self.q_proj = ColumnLinear(c.hidden_size, heads.q_size, mesh, bias=c.qkv_bias)
        self.rope = Rotary(rope)
        attention = SpanAttention if c.has_whole_spans and window is not None else PagedAttention
        self.attend = attention(self._heads, scale=c.attention_scale, sliding_window=window)
        self.attend.shares_cache_of = writer
        self.o_proj = joined_linear(heads.q_size, c.hidden_size, mesh, bias=c.out_bias)

    def forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        rotation = None
        if self.attend.shares_cache_of is None:
            q, k, v = self.qkv_proj(x)  # each [tokens, heads, dim]
            v = self.v_norm(v)
            rotation = self.rope.rotation(batch, (self.q_norm, self.k_norm))
        else:
            q = self.q_proj(x).view(x.shape[0], -1, self._heads.dim)
            q, _ = self.rope(q, q[:, :0], batch, norms=(self.q_norm, self.q_norm))
            k = v = q[:0, : self._heads.kv]  # nothing to write
        out: Tensor = self.o_proj(self.attend(q, k, v, batch, rotation))
        return out


class RouterNorm(RMSNorm):
    """The norm before a router: its weight is stored under the layer's name, times the root of the width."""

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        """Yield the weight [dim]."""
        (width,) = self.weight.shape
        yield TensorSlot(path, (width,), lambda stored: self.hold("weight", stored.float() * width**-0.5))


class SparseRouter(nn.Module):
    """The experts of each token of the stream, whose weights have a factor for each expert."""

    def __init__(self, c: Gemma4Config, mixture: Mixture) -> None:
        super().__init__()
        self.scale = RouterNorm(c.hidden_size, c.norm_eps)
        self.proj = Router(c.hidden_size, mixture.experts, mixture.rule, factors="per_expert_scale")

    def forward(self, x: Tensor) -> Routing:
        """x [tokens, hidden] → routing."""
        routing: Routing = self.proj(self.scale(x))
        return routing


class Layer(SandwichLayer):
    """A layer that returns the whole stream, and hands on the embeddings of all layers beside it."""

    def __init__(self, c: Gemma4Config, mesh: Mesh, index: int) -> None:
        is_wide = c.doubles_width and c.writer_of(index) is not None
        width = c.intermediate_size * (2 if is_wide else 1)
        super().__init__(c, Attention(c, mesh, index), GatedMLP(replace(c, intermediate_size=width), mesh))
        self.add = addition()
        self.layer_scalar = StoredFactor(c.hidden_size)
        self.router = None
        if c.mixture is not None:
            m = c.mixture
            self.router = SparseRouter(c, m)
            self.experts = Experts(c.hidden_size, m.width, m.experts, mesh, stored=m.stored, activation=m.activation)
            self.pre_feedforward_layernorm_2 = stream_norm(c)
            self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2 = stream_norm(c), stream_norm(c)
        self._input = None
        if c.input_size:
            start, length = mesh.share(c.input_size)
            self._input = slice(index * c.input_size + start, index * c.input_size + start + length)
            self.per_layer_input_gate = ColumnLinear(c.hidden_size, c.input_size, mesh)
            self.act, self.multiply = activation(c.activation), Elementwise("multiplied")
            self.per_layer_projection = joined_linear(c.input_size, c.hidden_size, mesh)
            self.post_per_layer_input_norm = RMSNorm(c.hidden_size, c.norm_eps)

    def forward(  # type: ignore[override]
        self, x: Tensor, inputs: Tensor | None, batch: ModelInput
    ) -> tuple[Tensor, Tensor | None]:
        """x [tokens, hidden], inputs [tokens, layers · input_size] → (the stream, inputs)."""
        change, stream = super().forward(x, None, batch)
        x = self.add(stream, change)
        if inputs is not None and self._input is not None:
            gated = self.multiply(self.act(self.per_layer_input_gate(x)), inputs[:, self._input])
            x = self.add(x, self.post_per_layer_input_norm(self.per_layer_projection(gated)))
        return self.layer_scalar(x), inputs

    def feed_forward(self, x: Tensor, stream: Tensor) -> Tensor:
        """x [tokens, hidden], the normalised stream, → [tokens, hidden]; the experts have a norm of their own."""
        dense = super().feed_forward(x, stream)
        if self.router is None:
            return dense
        sparse = self.experts(self.pre_feedforward_layernorm_2(stream), self.router(stream))
        normed = self.post_feedforward_layernorm_1(dense), self.post_feedforward_layernorm_2(sparse)
        out: Tensor = self.add(*normed)
        return out


class Gemma4ForCausalLM(DecoderStack):
    """The whole model."""

    RENAMED = BETWEEN_NORMS
    carries_residual = False

    @classmethod
    def read(cls, c: Checkpoint) -> Gemma4Config:
        c.expect("hidden_activation", GELU)
        windows = read_windows(c, is_windowed=True) or (None,) * c.positive("num_hidden_layers")
        windows = (*windows[:-1], None)  # the last layer sees all tokens, whatever the config says of it
        has_values = not c.bool("attention_k_eq_v", False)
        heads, wide = _read_heads(c, windows, has_values)
        ropes = {kind: read_rope(c, dim, kind=kind) for kind, dim in zip(KINDS, (wide.dim, heads.dim), strict=True)}
        input_size, input_rows = c.int("hidden_size_per_layer_input", 256), c.int("vocab_size_per_layer_input", 262_144)
        if input_size and input_rows < c.positive("vocab_size"):
            raise c.error("vocab_size_per_layer_input", f"at least vocab_size, which is {c.positive('vocab_size')}")
        num_sharing = c.int("num_kv_shared_layers", 0)
        if not 0 <= num_sharing < len(windows) or {*windows[: len(windows) - num_sharing]} != {*windows}:
            raise c.error("num_kv_shared_layers", "a number that leaves a layer of each kind before the last ones")
        return Gemma4Config.gemma(
            c,
            head_dim=heads.dim,
            heads=heads,
            norm=RMSNorm,
            windows=windows,
            rope=ropes[KINDS[0]],
            ropes=tuple(ropes[KINDS[window is not None]] for window in windows),
            attention_scale=1.0,
            logit_soft_cap=read_cap(c, "final_logit_softcapping", None),
            wide_heads=wide,
            has_values=has_values,
            has_whole_spans=c.values.get("use_bidirectional_attention") == "vision",
            padding_id=c.int("pad_token_id", 0),
            num_sharing=num_sharing,
            doubles_width=c.bool("use_double_wide_mlp", False),
            input_size=input_size,
            input_vocab_size=input_rows,
            mixture=_read_mixture(c) if c.bool("enable_moe_block", False) else None,
        )

    def __init__(self, c: Gemma4Config, mesh: Mesh) -> None:
        super().__init__(c, mesh, lambda index: Layer(c, mesh, index))
        self.embedding_factor = RoundedFactor(c.hidden_size**0.5)
        self.logit_factor = None if c.logit_soft_cap is None else Elementwise("soft_capped", c.logit_soft_cap)
        sharing = "|".join(str(layer) for layer in range(c.num_layers) if c.writer_of(layer) is not None)
        # checkpoints still hold what such layers had before they shared
        self.IGNORED = (*type(self).IGNORED, rf"layers\.(?:{sharing})\.self_attn\.[kv]_(?:proj|norm)\.weight")  # type: ignore[misc]
        self.has_inputs, self._padding_id = c.input_size > 0, c.padding_id
        if not self.has_inputs:
            return
        if mesh.pipeline.size > 1:
            raise ConfigError(
                "pipeline_parallel_size: the layers of this model receive embeddings of their own, which are not sent "
                "from stage to stage; use tensor_parallel_size"
            )
        width = c.num_layers * c.input_size
        self.embed_tokens_per_layer = Embedding(c.input_vocab_size, width, mesh)
        self.input_factor = RoundedFactor(c.input_size**0.5)
        self.per_layer_model_projection = ColumnLinear(c.hidden_size, width, Mesh.single())
        self.projection_factor = Elementwise("scaled", c.hidden_size**-0.5)
        self.per_layer_projection_norm = RMSNorm(c.input_size, c.norm_eps)
        self.add = addition()
        self.sum_factor = Elementwise("scaled", 2.0**-0.5)

    def embed(self, x: Tensor, batch: ModelInput) -> Tensor:
        """Make the embeddings [tokens, hidden]. Vectors of images are not multiplied."""
        x = super().embed(x, batch)
        return x if batch.embeddings is None else batch.embeddings.put_into(x)

    def begin(self, batch: ModelInput) -> tuple[Tensor, Tensor | None]:
        """Return the embeddings, and those of all layers [tokens, layers · input_size]."""
        x, _ = super().begin(batch)
        if not self.has_inputs:
            return x, None
        token_ids = batch.token_ids
        if batch.embeddings is not None:
            token_ids = token_ids.index_fill(0, batch.embeddings.token_indices, self._padding_id)
        projected = self.projection_factor(self.per_layer_model_projection(x))
        by_layer = projected.view(-1, self.per_layer_projection_norm.weight.shape[0])
        normed = self.per_layer_projection_norm(by_layer).view(projected.shape)
        return x, self.sum_factor(self.add(normed, self.input_factor(self.embed_tokens_per_layer(token_ids))))

    def normalize(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Return the normalised stream [tokens, hidden]."""
        return super().normalize(x, None)
