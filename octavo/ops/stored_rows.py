"""Reads the vectors that a cache keeps for each token, or for every few tokens, from its blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import gcd
from typing import TypeAlias

import torch
from torch import Tensor

from octavo.ops.recurrent import TokenRows

Empty: TypeAlias = Callable[..., Tensor]
"""Makes uninitialised tensors, as `torch.empty` does with a shape and a dtype."""


@dataclass(frozen=True, slots=True)
class StoredSequence:
    """A sequence's part of a step and of a cache: it computes `tokens` of the step, at positions from `start` on."""

    store: Tensor
    """[blocks, vectors of a block, values]: a vector for every `stride` tokens."""
    table: Tensor
    """int64 [blocks of the sequence]: their numbers in `store`."""
    block_size: int
    """Tokens of a block."""
    stride: int
    tokens: range
    start: int

    @property
    def length(self) -> int:
        """Number of tokens of the sequence, those of this step included."""
        return self.start + len(self.tokens)

    def tokens_at(self, start: int, stop: int) -> slice:
        """Return the indices in the step of the tokens at positions [start, stop)."""
        return slice(self.tokens.start + start - self.start, self.tokens.start + stop - self.start)

    def rows(self, positions: Tensor, begin: Tensor | int, size: int, empty: Empty = torch.empty) -> Tensor:
        """Return values at positions as `stored_rows` does: [..., size] for int64 positions [...]."""
        blocks, places = self.table[positions // self.block_size], positions % self.block_size // self.stride
        return stored_rows(self.store, blocks, places, begin, size, empty)


def stored_sequences(cache: Tensor, metadata: TokenRows, stride: int = 1) -> Iterator[StoredSequence]:
    """Yield the sequences of a step over a cache [blocks, values], which has a vector of every `stride` tokens."""
    size, first = metadata.block_size, 0
    store = cache.view(len(cache), -(-size // stride), -1)
    for table, length, count in zip(metadata.block_tables, metadata.lengths, metadata.query_lengths, strict=True):
        yield StoredSequence(store, table.long(), size, stride, range(first, first + count), length - count)
        first += count


def stored_rows(
    store: Tensor, blocks: Tensor, places: Tensor, begin: Tensor | int, size: int, empty: Empty = torch.empty
) -> Tensor:
    """Return the values from `begin` on of tokens in a store [blocks, tokens of a block, values], which is dense but
    for its blocks: [..., size] for int64 blocks and places [...].

    begin: a number, or multiples of `size`. Whole rows are copied; torch's indexing of several axes copies value by
    value. empty: on the host returns the memory of the copies, whose pages are costly where they are fresh.
    """
    first = blocks * store.stride(0) + places * store.stride(1) + begin
    step = gcd(*store.stride()[:2], size, begin if isinstance(begin, int) else 0)
    num_values = (len(store) - 1) * store.stride(0) + store[0].numel()
    rows = store.as_strided(((num_values - size) // step + 1, size), (step, 1))
    places = (first // step).flatten()
    if empty is torch.empty:
        return rows.index_select(0, places).view(*first.shape, size)
    found = empty((len(places), size), dtype=store.dtype)
    return torch.index_select(rows, 0, places, out=found).view(*first.shape, size)


def example_rows(counts: tuple[int, ...], lengths: tuple[int, ...], block_size: int) -> TokenRows:
    """Return the rows of a step, each with blocks of its own behind the null block."""
    most = -(-max(lengths) // block_size)
    tables = [[1 + most * row + each for each in range(most)] for row in range(len(counts))]
    return TokenRows.build(counts, lengths, tables, block_size)
