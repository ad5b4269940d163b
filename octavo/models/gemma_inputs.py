"""The parts that Gemma 3n and 4 share: late layers read the keys of earlier ones, and each layer may receive an
embedding of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.core.model_shape import LayerCache
from octavo.distributed.mesh import Mesh
from octavo.layers.attention import PagedAttention, SpanAttention
from octavo.layers.elementwise import Elementwise, RoundedFactor, activation, addition
from octavo.layers.embedding import Embedding
from octavo.layers.linear import ColumnLinear, QKVLinear, joined_linear
from octavo.layers.norm import RMSNorm, UnscaledRMSNorm
from octavo.layers.rotary import Rotary
from octavo.models.decoder import DecoderStack
from octavo.models.gemma_parts import BETWEEN_NORMS, GemmaConfig


@dataclass(frozen=True, kw_only=True)
class SharingConfig(GemmaConfig):
    """A decoder whose last layers have no keys and values of their own."""

    num_sharing: int
    """The number of last layers that read the keys and values of the last layer of their kind before them."""
    input_size: int
    """The width of each layer's own embedding; 0 where layers have none."""
    input_vocab_size: int
    """Rows of the table of those embeddings; 0 where they are projections of those of tokens alone."""
    padding_id: int
    """The token that stands in the place of images where the embeddings of layers are looked up."""

    def projects_values(self, layer: int) -> bool:
        """Return whether a layer projects values; else keys are values."""
        return True

    def writer_of(self, layer: int) -> int | None:
        """Return the layer whose keys and values a layer reads; None where it has its own."""
        own = self.num_layers - self.num_sharing
        same = [each for each in range(own) if self.window_of(each) == self.window_of(layer)]
        return None if layer < own else same[-1]

    def caches_of(self, layer: int, mesh: Mesh) -> Sequence[LayerCache]:
        """Return the cache of a layer that has keys and values of its own."""
        return () if self.writer_of(layer) is not None else super().caches_of(layer, mesh)


def read_sharing(c: Checkpoint, windows: Sequence[int | None], num_sharing: int) -> dict[str, Any]:
    """Return the fields of a `SharingConfig`. num_sharing: where the config has none. Raises CheckpointError."""
    num_sharing = c.int("num_kv_shared_layers", num_sharing)
    if not 0 <= num_sharing < len(windows) or {*windows[: len(windows) - num_sharing]} != {*windows}:
        raise c.error("num_kv_shared_layers", "a number that leaves a layer of each kind before the last ones")
    input_size = c.int("hidden_size_per_layer_input", 256)
    if input_size < 0:
        raise c.error("hidden_size_per_layer_input", "a width, or 0 for layers without embeddings of their own")
    return {
        "num_sharing": num_sharing,
        "input_size": input_size,
        "input_vocab_size": c.positive("vocab_size_per_layer_input", 262_144) if input_size else 0,
        "padding_id": c.int("pad_token_id", 0),
    }


class Attention(nn.Module):
    """Attention whose queries, keys and values are normalised head by head, the values without a weight."""

    def __init__(self, c: SharingConfig, mesh: Mesh, layer: int) -> None:
        super().__init__()
        heads, writer, window, rope = c.heads_of(layer), c.writer_of(layer), c.window_of(layer), c.rope_of(layer)
        assert rope is not None
        self._heads = heads.share(mesh)
        self.q_norm = RMSNorm(heads.dim, c.norm_eps)
        if writer is None:
            names = ("q_proj", "k_proj", "v_proj")[: 3 if c.projects_values(layer) else 2]
            self.qkv_proj = QKVLinear(c.hidden_size, heads, mesh, bias=c.qkv_bias, reads=names)
            self.k_norm, self.v_norm = RMSNorm(heads.dim, c.norm_eps), UnscaledRMSNorm(heads.dim, c.norm_eps)
        else:
            self.q_proj = ColumnLinear(c.hidden_size, heads.q_size, mesh, bias=c.qkv_bias)
        self.rope = Rotary(rope)
        attention = SpanAttention if c.has_whole_spans and window is not None else PagedAttention
        self.attend = attention(self._heads, c.ahead_of(layer), scale=c.attention_scale, sliding_window=window)
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
        return self.o_proj(self.attend(q, k, v, batch, rotation))


class LayerInput(nn.Module):
    """Multiplies a layer's own embedding by a gate, which is made of the stream, then projects and normalises it."""

    def __init__(self, c: SharingConfig, mesh: Mesh, index: int) -> None:
        super().__init__()
        start, length = mesh.share(c.input_size)
        self._own = slice(index * c.input_size + start, index * c.input_size + start + length)
        self.per_layer_input_gate = ColumnLinear(c.hidden_size, c.input_size, mesh)
        self.act, self.multiply = activation(c.activation), Elementwise("multiplied")
        self.per_layer_projection = joined_linear(c.input_size, c.hidden_size, mesh)
        self.post_per_layer_input_norm = RMSNorm(c.hidden_size, c.norm_eps)

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        """x [tokens, hidden], inputs [tokens, layers · input_size] → [tokens, hidden]."""
        gated = self.multiply(self.act(self.per_layer_input_gate(x)), inputs[:, self._own])
        return self.post_per_layer_input_norm(self.per_layer_projection(gated))


class SharingDecoder(DecoderStack):
    """A stack whose layers take and return (stream, embeddings of all layers)."""

    RENAMED = {**BETWEEN_NORMS, "layer_input": ""}
    carries_residual = False
    keeps_vectors = True

    def __init__(self, c: SharingConfig, mesh: Mesh, layer: Callable[[int], nn.Module]) -> None:
        super().__init__(c, mesh, layer)
        self.embedding_factor = RoundedFactor(c.hidden_size**0.5)
        sharing = "|".join(str(layer) for layer in range(c.num_layers) if c.writer_of(layer) is not None)
        # checkpoints still hold the keys' and values' weights that layers had before they shared
        self.ignore(rf"layers\.(?:{sharing})\.self_attn\.[kv]_(?:proj|norm)\.weight")
        self.has_inputs, self._padding_id = c.input_size > 0, c.padding_id
        self.has_table = c.input_vocab_size > 0
        if not self.has_inputs:
            return
        self.need_one_stage(
            "the layers of this model receive embeddings of their own, which are not sent from stage to stage"
        )
        width, rows = c.num_layers * c.input_size, c.input_vocab_size
        self.per_layer_model_projection = ColumnLinear(c.hidden_size, width, Mesh.single())
        self.projection_factor = Elementwise("scaled", c.hidden_size**-0.5)
        self.per_layer_projection_norm = RMSNorm(c.input_size, c.norm_eps)
        if not rows:
            return
        # tokens beyond the table have its first row
        self.within_table = Elementwise("share_ids", 0, rows, c.vocab_size) if rows < c.vocab_size else None
        self.embed_tokens_per_layer = Embedding(rows, width, mesh)
        self.input_factor = RoundedFactor(c.input_size**0.5)
        self.add = addition()
        self.sum_factor = Elementwise("scaled", 2.0**-0.5)

    def begin(self, batch: ModelInput) -> tuple[Tensor, Tensor | None]:
        """Return the embeddings, and those of all layers [tokens, layers · input_size]."""
        x, _ = super().begin(batch)
        if not self.has_inputs:
            return x, None
        projected = self.projection_factor(self.per_layer_model_projection(x))
        by_layer = projected.view(-1, self.per_layer_projection_norm.weight.shape[0])
        normed = self.per_layer_projection_norm(by_layer).view(projected.shape)
        if not self.has_table:
            return x, normed
        token_ids = batch.token_ids if self.within_table is None else self.within_table(batch.token_ids)
        if batch.embeddings is not None:
            token_ids = token_ids.index_fill(0, batch.embeddings.token_indices, self._padding_id)
        return x, self.sum_factor(self.add(normed, self.input_factor(self.embed_tokens_per_layer(token_ids))))

    def normalize(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Return the normalised stream [tokens, hidden]."""
        return super().normalize(x, None)
