"""Adds vectors of n-grams to several residual streams: tables read by hashes of tokens, and a dilated convolution.

Every rank has all streams; ranks share the rows of the tables. Source: Qwen's releases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from math import isqrt
from typing import Final

import torch
from torch import Tensor, nn

from octavo.attention.metadata import AttentionMetadata, ModelInput
from octavo.core.model_shape import State
from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError
from octavo.layers.embedding import Embedding
from octavo.layers.layer import Binding, Layer, TensorSlot
from octavo.layers.linear import ColumnLinear
from octavo.layers.recurrent import RecurrentLayer, ShortConvolution
from octavo.layers.turns import in_turns

_MASK: Final = (1 << 64) - 1
_STEPS: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_GAMMA: Final = 0x9E3779B97F4A7C15
_SEEDS_APART: Final = 10007


@dataclass(frozen=True, slots=True)
class NgramSizes:
    """Tables of n-grams of 2 to `longest` tokens."""

    longest: int
    heads: int
    """Number of tables for each length of n-grams."""
    dim: int
    """Elements of the vectors of all tables together."""
    vocab: int
    """Number of tokens of the vocabulary."""
    stop: int
    """The token that ends texts."""
    base: int
    """Least number of rows of a table."""
    multiple: int
    """The number of rows of all tables together is a multiple of this."""
    parts: int
    """Number of stored tensors that hold the tables; 0 for a single one."""
    seed: int
    """The seed of the hashes."""
    taps: int
    """Number of taps of the convolution."""

    @property
    def num_tables(self) -> int:
        """Tables of a layer."""
        return (self.longest - 1) * self.heads

    def state(self, width: int) -> State:
        """Return what a layer with streams of this width together keeps: tokens, and the tail of its convolution."""
        return State(self.longest - 1 + (self.taps - 1) * self.longest * width)

    def rows(self, place: int) -> list[int]:
        """Return the rows of each table of the `place`-th layer with some: primes, each once in all layers."""
        found = [_prime_from(self.base)]
        while len(found) < (place + 1) * self.num_tables:
            found.append(_prime_from(found[-1] + 1))
        return found[place * self.num_tables :]

    def multipliers(self, place: int) -> list[int]:
        """Return the odd factors of ids in the hashes: that of the current token, then those before it (splitmix64)."""
        half = max(1, ((1 << 63) - 1) // max(self.vocab, 1) // 2)
        found = []
        for index in range(self.longest):
            value = (self.seed + _SEEDS_APART * place + _GAMMA * (index + 2)) & _MASK
            for shift, factor in _STEPS:
                value = ((value ^ (value >> shift)) * factor) & _MASK
            found.append(2 * ((value ^ (value >> 31)) % half) + 1)
        return found


@lru_cache(4096)
def _prime_from(number: int) -> int:
    """Return the smallest prime of at least `number`. Each layer counts on from those of the layers before it."""
    while number < 2 or not all(number % each for each in range(2, isqrt(number) + 1)):
        number += 1
    return number


class NgramHashes(Layer):
    """Ids of tokens, and of those before them, become rows of tables. A checkpoint may repeat the numbers of this."""

    def __init__(self, sizes: NgramSizes, place: int) -> None:
        super().__init__()
        self._sizes, rows = sizes, sizes.rows(place)
        self.num_rows = -(-sum(rows) // sizes.multiple) * sizes.multiple
        self._numbers = {
            "layer_multipliers": sizes.multipliers(place),
            "ngram_heads_vocab_sizes": rows,
            "ngram_heads_offsets": [0, *accumulate(rows[:-1])],
        }

    def forward(self, ids: Tensor, before: Tensor) -> Tensor:
        """ids int64 [tokens], before [tokens, longest - 1] → rows [tokens, tables]."""
        factors, rows, starts = self._tensors
        mixed, found = ids * factors[0], []
        for place in range(1, self._sizes.longest):
            mixed = mixed ^ (before[:, place - 1] * factors[place])
            found.append(mixed[:, None].expand(-1, self._sizes.heads))
        return torch.cat(found, 1) % rows + starts

    def bind(self, binding: Binding) -> None:
        """Store the operators, and the numbers as tensors."""
        super().bind(binding)
        self._tensors = [torch.tensor(each, device=binding.device) for each in self._numbers.values()]

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        for name, own in self._numbers.items():
            stored = f"{path.rpartition('.')[0]}.{name}"
            yield TensorSlot(stored, (len(own),), partial(_check, stored, own), required=False, dtype=torch.int64)


def _check(name: str, own: list[int], stored: Tensor) -> None:
    if stored.tolist() != own:
        raise CheckpointError(
            f"{name} differs from what seed, vocab_size, ngram_vocab_size_base and ngram_size of config.json give; "
            "the config belongs to another checkpoint: download both again"
        )


class NgramTable(Embedding):
    """Tables one after the other, in stored tensors of these names behind the layer's, with so many rows each. Ranks
    share the rows of all."""

    def __init__(self, parts: Mapping[str, int], dim: int, mesh: Mesh) -> None:
        super().__init__(sum(parts.values()), dim, mesh)
        self._parts = parts

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        own, start = self.share, 0
        for name, length in self._parts.items():
            first, last = max(own.start, start), min(own.start + own.length, start + length)
            rows = slice(first - start, max(first, last) - start)
            fill = partial(self._fill, rows, first - own.start)
            shape = (length, self.weight.shape[1])
            yield TensorSlot(f"{path}.{name}weight", shape, fill, parts=((rows,),) if first < last else ())
            start += length

    def _fill(self, rows: slice, target: int, stored: Tensor) -> None:
        room = self.room("weight", stored.device)
        if rows.start < rows.stop:
            room[target : target + rows.stop - rows.start].copy_(stored[rows])


class StreamNorms(Layer):
    """The RMS norm of each stream of x [tokens, streams · dim], whose stored weights are around zero."""

    def __init__(self, count: int, dim: int, eps: float) -> None:
        super().__init__()
        self._count, self._eps = count, eps
        self.weight = nn.Parameter(torch.empty(count * dim), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, streams · dim] → the same shape."""
        both = zip(x.chunk(self._count, 1), self.weight.chunk(self._count), strict=True)
        return torch.cat([self.ops.rms_norm(own.contiguous(), each, self._eps, 1.0) for own, each in both], 1)


class DilatedConvolution(ShortConvolution):
    """SiLU of a causal convolution of each channel over every `dilation`-th token."""

    def __init__(self, channels: int, taps: int, dilation: int) -> None:
        super().__init__(channels, (slice(0, channels),), taps, bias=False)
        self._dilation = dilation

    def forward(self, x: Tensor, states: Tensor, metadata: AttentionMetadata) -> Tensor:  # type: ignore[override]
        """x [tokens, channels] → the same shape; states are those of the operator."""
        return in_turns(self.ops.dilated_convolution, (x,), (self.weight, self._dilation, states), metadata)


class NgramEmbedding(nn.Module):
    """Hashes and tables, under the names of the checkpoint."""

    def __init__(self, sizes: NgramSizes, place: int, mesh: Mesh) -> None:
        super().__init__()
        self.hashes = NgramHashes(sizes, place)
        total = self.hashes.num_rows
        step, parts = -(-total // max(sizes.parts, 1)), {"": total}
        if sizes.parts:
            starts = range(0, total, step)
            parts = {f"shard_{number}.": min(step, total - start) for number, start in enumerate(starts)}
        self.ngram_embedding = NgramTable(parts, sizes.dim // sizes.num_tables, mesh)

    def forward(self, ids: Tensor, before: Tensor) -> Tensor:
        """ids int64 [tokens], before [tokens, longest - 1] → [tokens, dim]."""
        rows = self.hashes(ids, before)
        found: Tensor = self.ngram_embedding(rows.flatten())
        return found.view(len(ids), -1)


class NgramStreams(RecurrentLayer):
    """Adds to each stream the vectors of n-grams, weighted by how well they match the stream, and their convolution."""

    def __init__(self, sizes: NgramSizes, place: int, count: int, hidden: int, eps: float, mesh: Mesh) -> None:
        """place: of the layer among those with tables."""
        super().__init__((), 0, slice(0, 0))
        self._sizes, width = sizes, count * hidden
        self._widths = [width, hidden]
        self.ple_embedding = NgramEmbedding(sizes, place, mesh)
        self.proj = ColumnLinear(sizes.dim, self._widths, Mesh.single(), reads=["key_proj", "value_proj"])
        self.norm_key, self.norm_query, self.norm_conv = (StreamNorms(count, hidden, eps) for _ in range(3))
        self.conv1d = DilatedConvolution(width, sizes.taps, sizes.longest)

    def forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        """x [tokens, streams · hidden] → the same shape."""
        (states, metadata), count = self.states(batch), self._sizes.longest - 1
        others = count, self._sizes.stop, states[:, :count]
        before = in_turns(self.ops.previous_tokens, (batch.token_ids,), others, metadata)
        keys, values = self.proj(self.ple_embedding(batch.token_ids, before)).split(self._widths, 1)
        opened = self.ops.agreeing_values(self.norm_key(keys), self.norm_query(x), values.contiguous())
        local = self.conv1d(self.norm_conv(opened), states[:, count:], metadata)
        return self.ops.add(x, self.ops.add(opened, local))


@dataclass(frozen=True, slots=True)
class SplitNgrams:
    """Tables of n-grams of 2 to `longest` tokens; each table has two rows more than the one before."""

    longest: int
    splits: int
    """Number of tables for each length of n-grams."""
    base: int
    """Rows of the first table, minus one."""
    vocab: int
    """Number of tokens of the vocabulary."""
    stop: int
    """The token that ends texts."""

    @property
    def rows(self) -> list[int]:
        """Rows of each table."""
        return [self.base + 2 * place + 1 for place in range((self.longest - 1) * self.splits)]


class NgramInputs(RecurrentLayer):
    """The mean of a token's embedding and of what tables have for the n-grams that it ends, each behind a projection.

    An n-gram is a number whose digits are ids of tokens, and its row the remainder by the rows of the table. Source:
    https://arxiv.org/abs/2601.21204.
    """

    def __init__(self, sizes: SplitNgrams, hidden: int, mesh: Mesh) -> None:
        super().__init__((), 0, slice(0, 0))
        self._sizes, count = sizes, len(sizes.rows)
        parts = {f"{place}.": rows for place, rows in enumerate(sizes.rows)}
        self.embedders = NgramTable(parts, hidden // count, mesh)
        self.post_projs = nn.ModuleList(ColumnLinear(hidden // count, hidden, Mesh.single()) for _ in range(count))

    def forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        """x [tokens, hidden], embeddings of tokens, → the same shape."""
        (states, metadata), (ids, by) = self.states(batch), (batch.token_ids, self._sizes)
        others = by.longest - 1, by.stop, states
        before = in_turns(self.ops.previous_tokens, (ids,), others, metadata)
        before = torch.where(before == by.stop, 0, before)
        found, start = [], 0
        for place, rows in enumerate(by.rows):
            number = ids
            for distance in range(1, place // by.splits + 2):
                number = number + before[:, distance - 1] * pow(by.vocab, distance, rows) % rows
            found.append(number % rows + start)
            start += rows
        vectors = self.embedders(torch.stack(found, 1).flatten()).view(len(ids), len(found), -1)
        for place, project in enumerate(self.post_projs):
            x = self.ops.add(x, project(vectors[:, place].contiguous()))
        return self.ops.scaled(x, 1.0 / (len(found) + 1))
