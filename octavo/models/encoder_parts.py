"""The parts of encoders beside their layers: the config of all of them, and their heads for labels and tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.core.model_shape import KeysAndValues, LayerCache
from octavo.distributed.mesh import Mesh
from octavo.layers.disentangled import DisentangledScores, RelativePlaces
from octavo.layers.distance import DistanceBiases
from octavo.layers.elementwise import activation
from octavo.layers.embedding import TokenBias
from octavo.layers.heads import Heads
from octavo.layers.linear import ColumnLinear, GatedLinear, joined_linear
from octavo.layers.rope import Rope
from octavo.models.blocks import GatedLayer, GatedMLP, RotaryAttention
from octavo.models.config import KINDS, DecoderConfig, even_share
from octavo.models.ropes import read_rope

_PLAIN: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {"silu": functional.silu, "tanh": torch.tanh}
"""Functions of heads that are no operators, by their names in config.json."""


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(DecoderConfig):
    """num_types: kinds of tokens that have embeddings of their own, 0 for none. num_tasks: rows of a table whose first
    is added to all tokens, 0 for none. biases: makes, for some of the heads, the biases of scores by distance.
    embedding_size: width of embeddings that are projected, 0 where they are not. Fields of heads are those of a
    classifier's: the function of its dense layer, whether that has a bias, and whether a norm follows."""

    num_types: int = 0
    num_tasks: int = 0
    embedding_size: int = 0
    order: tuple[int, ...] = ()
    """The layers that are applied one after the other, of a family whose layers share weights."""
    group_size: int = 1
    """The number of layers in each group; names of tensors count layers within their group."""
    biases: Callable[[slice], DistanceBiases | RelativePlaces] | None = None
    head_function: str = "tanh"
    head_bias: bool = True
    is_head_normed: bool = False

    @classmethod
    def encoder(cls, c: Checkpoint, **own: Any) -> Self:
        """Read the keys that encoders share; they have as many heads of keys as of queries. `own` adds or replaces
        fields."""
        hidden, count = c.positive("hidden_size"), c.positive("num_attention_heads")
        heads = Heads(count, count, even_share(c, "hidden_size", hidden, count))
        fields = {"rope": None, "windows": (), "tied": False, "has_head": False, "is_bidirectional": True, **own}
        return cls.common(c, heads=heads, **fields)

    def caches_of(self, layer: int, mesh: Mesh) -> Sequence[LayerCache]:
        """Return the one cache, of layer 0, which the others write to after it."""
        return (LayerCache(KeysAndValues(self.heads.share(mesh).kv, self.heads.dim)),) if layer == 0 else ()


class DisentangledAttention(RotaryAttention):
    """Attention to tokens and to their distances, whose queries and keys have the same projections."""

    def __init__(self, c: EncoderConfig, mesh: Mesh, layer: int, places: RelativePlaces) -> None:
        super().__init__(c, mesh, layer)
        self.attend = self.scored = DisentangledScores(self.attend.heads, scale=c.attention_scale)
        self._shared = (places,)  # a module of the model, not of each layer

    def forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        metadata = batch.attention[self.attend.cache_group]
        places, rows = metadata.once("places", lambda: self._shared[0](metadata))
        place_q, place_k, _ = self.qkv_proj(places)
        q, k, v = self.qkv_proj(x)
        return self.o_proj(self.scored.among((q, k, v), (place_q, place_k), rows, batch))


class PreNormLayer(GatedLayer):
    """Attention and MLP, each behind a norm, but for the first layer's attention, which reads the stream."""

    def forward(self, x: Tensor, residual: Tensor | None, batch: ModelInput) -> tuple[Tensor, Tensor]:
        if residual is not None:
            return super().forward(x, residual, batch)
        normed, residual = self.post_attention_layernorm.add(self.self_attn(x, batch), x)
        return self.mlp(normed), residual


class LabelHead(nn.Module):
    """The scores of the labels alone."""

    def __init__(self, c: EncoderConfig, num_labels: int) -> None:
        super().__init__()
        self.classifier = ColumnLinear(c.hidden_size, num_labels, Mesh(), bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """x [rows, hidden] → [rows, labels]."""
        return self.classifier(x)


class ClassifierHead(LabelHead):
    """Dense layer and activation, perhaps a norm, and the scores of the labels."""

    def __init__(self, c: EncoderConfig, num_labels: int) -> None:
        super().__init__(c, num_labels)
        self.dense = ColumnLinear(c.hidden_size, c.hidden_size, Mesh(), bias=c.head_bias)
        self._act = _PLAIN[c.head_function] if c.head_function in _PLAIN else activation(c.head_function)
        self.norm = c.norm(c.hidden_size, c.norm_eps) if c.is_head_normed else None

    def forward(self, x: Tensor) -> Tensor:
        """x [rows, hidden] → [rows, labels]."""
        x = self._act(self.dense(x))
        return super().forward(x if self.norm is None else self.norm(x))


class MaskedHead(nn.Module):
    """BERT's head for guesses of masked tokens: dense layer, activation and norm before the embedding's table, and a
    bias behind it."""

    def __init__(self, c: EncoderConfig) -> None:
        super().__init__()
        self.dense = ColumnLinear(c.hidden_size, c.hidden_size, Mesh(), bias=True)
        self.act = activation(c.activation)
        self.norm = c.norm(c.hidden_size, c.norm_eps)
        self.decoder = TokenBias(c.vocab_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] → the rows that are multiplied by the table, [rows, hidden]."""
        return self.norm(self.act(self.dense(hidden)))


class UpGateLinear(GatedLinear):
    """x [tokens, inputs] → gelu(gate(x)) * up(x), of a tensor that has `up` before the gate."""

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, inputs] → [tokens, share of width]."""
        up, gate = self.prepared(x).chunk(2, dim=-1)
        return self.ops.multiplied(self.ops.gelu(gate), up)


class GateUpMLP(GatedMLP):
    """`down(gelu(gate(x)) * up(x))` of a tensor of both, of which `down` alone has a bias."""

    def __init__(self, c: EncoderConfig, mesh: Mesh) -> None:
        super().__init__(replace(c, gate_up_reads=(), mlp_bias=False), mesh)
        self.down_proj = joined_linear(c.intermediate_size, c.hidden_size, mesh, bias=True)


class UpGateMLP(nn.Module):
    """`down(gelu(gate(x)) * up(x))`, of which `down` alone has a bias."""

    def __init__(self, c: EncoderConfig, mesh: Mesh) -> None:
        super().__init__()
        self.up_gate_proj = UpGateLinear(c.hidden_size, c.intermediate_size, mesh, reads=(), activation="gelu")
        self.down_proj = joined_linear(c.intermediate_size, c.hidden_size, mesh, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        return self.down_proj(self.up_gate_proj(x))


def modern_windows(c: Checkpoint, window: int) -> tuple[int | None, ...]:
    """Return the window of each layer of ModernBERT, None for all tokens: every third layer sees these unless the
    config says otherwise. Raises CheckpointError."""
    num_layers, every = c.positive("num_hidden_layers"), c.positive("global_attn_every_n_layers", 3)
    kinds = c.values.get("layer_types") or [KINDS[layer % every > 0] for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in KINDS for kind in kinds):
        raise c.error("layer_types", f"{' or '.join(KINDS)} for each of {num_layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def modern_ropes(c: Checkpoint, head_dim: int, windows: Sequence[int | None]) -> tuple[Rope, ...]:
    """Return the rotation of each layer of ModernBERT; older configs state both bases beside each other."""
    if c.has_ropes_by_kind():
        return tuple(read_rope(c, head_dim, kind=KINDS[window is not None]) for window in windows)
    of_all, local = c.positive_float("global_rope_theta", 160_000.0), c.positive_float("local_rope_theta", 10_000.0)
    rope = read_rope(c, head_dim)
    return tuple(replace(rope, theta=of_all if window is None else local) for window in windows)
