"""Rows with guesses go through a recurrence in two turns: no state is kept behind a guess, which may be wrong.

First come the known tokens of all rows, which leave their states as always; then the guesses, each row from the state
that its known tokens have left. A cut of a row changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.attention.metadata import AttentionMetadata


class Turns(NamedTuple):
    """Two parts of a step. places: of their tokens, int64 [tokens] each. order: of all tokens, in both together."""

    places: tuple[Tensor, Tensor]
    rows: tuple[AttentionMetadata, AttentionMetadata]
    order: Tensor


def in_turns(
    run: Callable[..., Tensor], tensors: Sequence[Tensor], others: Sequence[Any], metadata: AttentionMetadata
) -> Tensor:
    """Return `run(*tensors, *others, metadata)`, [tokens, …], in turns where rows have guesses.

    tensors: each [tokens, …].
    """
    if not metadata.num_guesses:
        return run(*tensors, *others, metadata)
    turns = metadata.once(Turns, lambda: turns_of(metadata))
    both = zip(turns.places, turns.rows, strict=True)
    return torch.cat([run(*(each[places] for each in tensors), *others, rows) for places, rows in both])[turns.order]


def turns_of(metadata: AttentionMetadata) -> Turns:
    """Return the turns of a step, some of whose rows have guesses."""
    device, size = metadata.block_tables.device, metadata.block_size
    starts = [0, *accumulate(metadata.query_lengths)]
    guesses = [*metadata.num_guesses]
    known = [count - each for count, each in zip(metadata.query_lengths, guesses, strict=True)]
    guessing = [row for row, each in enumerate(guesses) if each]
    behind = [metadata.lengths[row] - guesses[row] for row in range(len(guesses))]
    firsts = [range(start, start + count) for start, count in zip(starts, known, strict=False)]
    seconds = [range(starts[row] + known[row], starts[row + 1]) for row in guessing]
    places = tuple(_longs([at for each in ranges for at in each], device) for ranges in (firsts, seconds))
    order = torch.argsort(torch.cat(places))
    last = _longs([(behind[row] - 1) // size for row in guessing], device)
    states = metadata.block_tables[_longs(guessing, device), last]
    counts = [guesses[row] for row in guessing]
    # one block with the state, and null blocks for the guesses
    tables = metadata.block_tables.new_zeros((len(guessing), 1 + -(-max(counts) // size)))
    tables[:, 0] = states
    slots = metadata.slot_mapping
    rows = (
        _rows(known, behind, metadata.block_tables, slots[places[0]], size),
        _rows(counts, [size + each for each in counts], tables, slots.new_zeros(len(places[1])), size),
    )
    return Turns((places[0], places[1]), rows, order)


def _rows(
    counts: Sequence[int], lengths: Sequence[int], tables: Tensor, slots: Tensor, block_size: int
) -> AttentionMetadata:
    starts, ends = (
        torch.tensor(each, dtype=torch.int32, device=tables.device) for each in ([0, *accumulate(counts)], lengths)
    )
    return AttentionMetadata(starts, ends, tables, slots, block_size, counts, lengths)


def _longs(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
