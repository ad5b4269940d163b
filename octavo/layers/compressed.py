"""Attention to the last tokens and to compressed ones, `ops.compressed`, and its caches.

A layer has a cache of the last tokens, and where it compresses one of what its windows are made of and one of their
vectors. Every rank has all of these: heads share one key. Source: DeepSeek-V4's release.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.core.model_shape import LayerCache, Spaced
from octavo.distributed.mesh import Mesh
from octavo.layers.layer import CachedLayer, Layer, TensorSlot
from octavo.layers.linear import ColumnLinear
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import Rope
from octavo.layers.rotary import Rotary
from octavo.layers.routers import ExactLinear
from octavo.ops.compressed import Ends, Sight, SmallQueries, ends_of, store_vectors
from octavo.ops.prepare_linear import LinearShape, PreparedLinear, TensorSpec, heads_apart
from octavo.ops.registry import Ops


@dataclass(frozen=True, slots=True)
class Compression:
    """Every window of `rate` tokens leaves a vector of `dim` elements. Windows overlap where queries choose vectors.

    num_chosen: how many vectors a query chooses, by `index_heads` small queries and a small key of `index_dim` elements
    for each vector; 0 where queries attend to all vectors.
    """

    rate: int
    dim: int
    num_chosen: int = 0
    index_heads: int = 0
    index_dim: int = 0

    @property
    def widths(self) -> tuple[int, ...]:
        """Elements that a token adds to each kind of vector; it has as many gates."""
        return (2 * self.dim, 2 * self.index_dim) if self.num_chosen else (self.dim,)

    def caches(self) -> tuple[LayerCache, LayerCache]:
        """Return the cache of what tokens add to open windows, and that of the vectors of windows."""
        span = self.rate * (2 if self.num_chosen else 1)
        parts = Spaced(2 * sum(self.widths))
        return LayerCache(parts, span), LayerCache(Spaced(self.dim + self.index_dim, self.rate))


@dataclass(frozen=True, slots=True)
class PoolChoice:
    """Queries choose `num_chosen` windows of `rate` tokens, by `count` small heads of `size` elements."""

    rate: int
    num_chosen: int
    count: int
    size: int

    @property
    def num_tokens(self) -> int:
        """The most tokens that a query attends to: those of its windows, and those behind the last window."""
        return (self.num_chosen + 1) * self.rate - 1


class VectorCache(CachedLayer):
    """A layer with a cache of one vector for every `stride` tokens."""

    def __init__(self, stride: int = 1) -> None:
        super().__init__()
        self._stride = stride

    def store(self, values: Tensor, batch: ModelInput, ends: Ends | None = None) -> None:
        """Write values [vectors, size]: of each token, or of those in `ends`."""
        store_vectors(values, self.of(batch), batch.attention[self.cache_group], self._stride, ends)

    def of(self, batch: ModelInput) -> Tensor:
        """Return the cache [blocks, values]."""
        return batch.kv_caches[self.cache_index][0]


class WindowAttention(VectorCache):
    """Attends to the last tokens, and to compressed vectors where there are some.

    Each head has a stored score, `sinks` beside the layer, that takes part in the softmax and has no value. `own` are
    this rank's of `heads`.
    """

    parameter_dtype = torch.float32

    def __init__(self, sight: Sight, heads: int, own: slice) -> None:
        super().__init__()
        self._sight, self._heads, self._own = sight, heads, own
        self.weight = nn.Parameter(torch.empty(own.stop - own.start), requires_grad=False)

    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        batch: ModelInput,
        vectors: VectorCache | None = None,
        small: SmallQueries | None = None,
    ) -> Tensor:
        """q [tokens, heads, dim], kv [tokens, dim], the keys and values of tokens → [tokens, heads, dim]."""
        self.store(kv, batch)
        caches = [self] if vectors is None else [self, vectors]
        return self.ops.compressed_attention(
            q,
            [each.of(batch) for each in caches],
            [batch.attention[each.cache_group] for each in caches],
            self._sight,
            self.weight,
            small,
        )

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        yield self.rows_slot(f"{path.rpartition('.')[0]}.sinks", (self._heads,), self._own)


class OpenWindows(VectorCache):
    """The cache of what tokens add to the vectors of their windows."""

    def __init__(self, compression: Compression) -> None:
        super().__init__()
        self._compression = compression

    def ended(self, parts: Tensor, biases: Sequence[Tensor], batch: ModelInput) -> tuple[Ends, list[Tensor]]:
        """Write parts [tokens, values], and return the vectors of the windows that end, [windows, dim] of each kind."""
        self.store(parts, batch)
        metadata, c = batch.attention[self.cache_group], self._compression
        ends = metadata.once((Ends, c.rate), lambda: ends_of(metadata, c.rate))
        vectors = self.ops.compressed_windows(
            self.of(batch), metadata, ends, biases, parts.dtype, is_overlapping=c.num_chosen > 0
        )
        return ends, vectors


class PoolKeys(VectorCache):
    """The cache of the small keys of windows, by which queries choose windows."""

    def __init__(self, rate: int, num_chosen: int, num_tokens: int) -> None:
        """Arguments are those of `choose_pools`."""
        super().__init__(rate)
        self._numbers = rate, num_chosen, num_tokens

    def choose(self, small: SmallQueries, batch: ModelInput) -> Tensor:
        """Return which tokens queries attend to, int32 [tokens, num_tokens], -1 behind the last one."""
        return self.ops.choose_pools(small, self.of(batch), batch.attention[self.cache_group], *self._numbers)


class FloatTable(Layer):
    """A stored tensor under the layer's own name, in float32."""

    parameter_dtype = torch.float32

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape), requires_grad=False)

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        yield TensorSlot(path, tuple(self.weight.shape), partial(self.hold, "weight"))


class GroupedLinear(Layer):
    """x [tokens, groups · inputs] → [tokens, groups · outputs], each group by a weight of its own.

    `own` are this rank's groups of `groups`. The weight, [groups · outputs, inputs], is never quantised.
    """

    def __init__(self, groups: int, own: slice, inputs: int, outputs: int) -> None:
        super().__init__()
        self._rows, self._stored_shape = slice(own.start * outputs, own.stop * outputs), (groups * outputs, inputs)
        self._count, self._inputs, self._outputs = own.stop - own.start, inputs, outputs
        self.weight = nn.Parameter(torch.empty(self._count * outputs, inputs), requires_grad=False)
        self._prepared: PreparedLinear

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, this rank's groups · inputs] → [tokens, this rank's groups · outputs]."""
        return self._prepared.by_head(x.view(len(x), self._count, self._inputs), self._outputs).flatten(1)

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        yield self.rows_slot(f"{path}.weight", self._stored_shape, self._rows)

    def finish(self) -> None:
        groups = self.weight.data.view(self._count, self._outputs, self._inputs)
        padded = F.pad(groups, (0, 0, 0, heads_apart(self._outputs) - self._outputs))
        self._prepared = self.ops.prepare_linear(padded.flatten(0, 1))
        self.register_parameter("weight", None)

    def state_specs(self, ops: Ops) -> dict[str, TensorSpec]:
        return dict(ops.prepare_linear.state_specs(self._shape()))

    def state(self) -> dict[str, Tensor]:
        return self._prepared.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self._prepared = self.ops.prepare_linear.restore(self._shape(), state)
        self.register_parameter("weight", None)

    def _shape(self) -> LinearShape:
        return LinearShape(self._count * heads_apart(self._outputs), self._inputs, self.weight.dtype)


class Indexer(nn.Module):
    """The small queries and keys by which vectors are chosen."""

    def __init__(self, c: Compression, hidden: int, q_rank: int, eps: float) -> None:
        super().__init__()
        self._sizes = c.index_heads, c.index_dim
        self.q_b_proj = ColumnLinear(q_rank, c.index_heads * c.index_dim, Mesh.single())
        self.weights_proj = ExactLinear(hidden, c.index_heads)
        self.position_bias = FloatTable(c.rate, c.widths[1])
        self.kv_norm = RMSNorm(c.index_dim, eps)

    def queries(self, x: Tensor, narrow: Tensor, rope: Rotary, batch: ModelInput) -> SmallQueries:
        """Return the small queries of tokens, made of the stream x [tokens, hidden] and of narrow [tokens, q_rank]."""
        heads, dim = self._sizes
        queries = self.q_b_proj(narrow).view(len(x), heads, dim)
        factor = float((heads * dim) ** -0.5)
        return SmallQueries(end_turned(queries, rope, batch.positions), self.weights_proj(x) * factor)


class Compressor(nn.Module):
    """Makes the vectors of windows, and their small keys where queries choose vectors."""

    def __init__(self, c: Compression, hidden: int, q_rank: int, rope: Rope, eps: float) -> None:
        super().__init__()
        self.parts, self.vectors = OpenWindows(c), VectorCache(c.rate)
        self.position_bias = FloatTable(c.rate, c.widths[0])
        self.kv_norm = RMSNorm(c.dim, eps)
        self.rope = Rotary(rope)
        self.indexer = Indexer(c, hidden, q_rank, eps) if c.num_chosen else None
        self._rate = c.rate

    def store(self, parts: Tensor, batch: ModelInput) -> None:
        """Store parts [tokens, values], and the vectors of the windows that end with one of these tokens."""
        kinds = [(self.position_bias, self.kv_norm)]
        if self.indexer is not None:
            kinds.append((self.indexer.position_bias, self.indexer.kv_norm))
        ends, made = self.parts.ended(parts, [bias.weight for bias, _ in kinds], batch)
        if not len(ends.positions):
            return
        firsts = ends.positions - (self._rate - 1)
        vectors = [
            end_turned(norm(each).unsqueeze(1), self.rope, firsts).squeeze(1)
            for (_, norm), each in zip(kinds, made, strict=True)
        ]
        self.vectors.store(torch.cat(vectors, 1), batch, ends)


def end_turned(x: Tensor, rope: Rotary, places: Tensor | ModelInput) -> Tensor:
    """Return x [vectors, heads, dim] with the last elements of each head rotated, as many as the rotation has.

    places: the positions of the vectors, int64 [vectors]; or a step, whose tokens are rotated in the other direction.
    """
    still, turning = x[..., : -rope.rope.dim], x[..., -rope.rope.dim :].contiguous()
    turned = rope.at(turning, places) if isinstance(places, Tensor) else rope.back(turning, places)
    return torch.cat((still, turned), -1)
