"""Attention to blocks of keys that each query chooses by small keys of their own.

The keys of a sequence lie in blocks of `width` consecutive ones. A query scores every key before it by its product with
the small key of that token; a block has the highest score of its keys. The query attends to the `num_chosen` blocks
with the highest scores, of which the last `num_recent` ones that it sees are always some; each head of keys chooses
apart. Where there are no more than `num_chosen` blocks it attends to all tokens, and no scores are computed.

What a token adds to a sum depends on its position alone, never on what else is computed: queries that see equally many
blocks are attended together, in fours.

Source: the releases of MiniMax-M3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.recurrent import TokenRows, trial_on_copy
from octavo.ops.registry import Operator
from octavo.ops.stored_rows import Empty, StoredSequence, example_rows, stored_sequences

KEY_TILE: Final = 32
"""Queries see a multiple of this many keys, the hidden ones included, as in the reference of other attention."""
GATHERED_KEYS: Final = 1 << 14
"""Most keys of a head that are gathered at once for queries that choose; those of one query may be more."""
MOST_COPIES: Final = 1 << 16
"""Most tokens of a sequence that an implementation copies whole."""
_SCORED_KEYS: Final = 1 << 20
"""Most small keys that are scored at once for all queries; those of one query may be more."""


class BlockChoice(NamedTuple):
    """Which blocks a query attends to, and the factor of its scores."""

    scale: float
    width: int
    """Keys of a block."""
    num_chosen: int
    """Blocks that a query attends to."""
    num_recent: int
    """How many of them are the last ones."""


@dataclass(frozen=True, slots=True)
class Sequence(StoredSequence):
    """A sequence with keys and values of `kv_heads` of `dim` elements each, and a small key behind them."""

    kv_heads: int
    dim: int

    def heads(self, positions: Tensor, section: int, empty: Empty = torch.empty) -> Tensor:
        """Return keys (section 0) or values (1) as they are stored, [queries, kv_heads, keys, dim], at positions
        [queries, kv_heads or 1, keys]; `empty` as of `stored_rows`."""
        heads = torch.arange(self.kv_heads, device=positions.device)[:, None] + section * self.kv_heads
        return self.rows(positions, heads * self.dim, self.dim, empty)

    def small_keys(self, positions: Tensor) -> Tensor:
        """Return the small keys at positions [keys], float32 [keys, size]."""
        begin = 2 * self.kv_heads * self.dim
        return self.rows(positions, begin, self.store.shape[2] - begin).float()


def block_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, small: tuple[Tensor, Tensor], cache: Tensor, metadata: TokenRows, by: BlockChoice
) -> Tensor:
    """Write keys to their slots, then let every query attend to the blocks that it chooses, itself included.

    q is [tokens, heads, dim], k and v are [tokens, kv_heads, dim], `small` the queries [tokens, kv_heads, size] and the
    keys [tokens, size] of the choice; the result is [tokens, heads, dim]. `cache` [blocks, values] is the layer's, with
    key, value and small key of each token of a block one after the other; it is updated in place.
    """
    out = torch.zeros_like(q)
    if q.is_meta:
        return out
    for sequence in written_sequences(k, v, small[1], cache, metadata):
        for start, stop in spans(sequence.start, sequence.length, by):
            tokens = sequence.tokens_at(start, stop)
            out[tokens] = _attend(q[tokens], small[0][tokens], sequence, range(start, stop), by)
    return out


def attend_chosen_keys(
    q: Tensor, k: Tensor, v: Tensor, cache: Tensor, metadata: TokenRows, chosen: Tensor, scale: float
) -> Tensor:
    """Write keys to their slots, then let every query attend to the tokens that are chosen for all its heads.

    q is [tokens, heads, dim], k and v are [tokens, kv_heads, dim], the result is [tokens, heads, dim]. `cache` [blocks,
    values] is the layer's, with key and value of each token one after the other; it is updated in place. chosen: int32
    [tokens, most] as of `choose_pools`; a query that sees no more than `most` tokens attends to all of them.
    """
    out = torch.zeros_like(q)
    if q.is_meta:
        return out
    most = chosen.shape[1]
    for sequence in written_sequences(k, v, k.new_empty(len(k), 0), cache, metadata):
        start = sequence.start
        while start < sequence.length:
            padded = min(-(-(start + 1) // KEY_TILE), -(-most // KEY_TILE)) * KEY_TILE
            if start < most:
                stop = min(sequence.length, padded, most)
                keys = torch.arange(padded, device=q.device).expand(1, 1, -1)
            else:
                stop = min(sequence.length, start + max(1, GATHERED_KEYS // padded))
                own = chosen[sequence.tokens_at(start, stop)].long()
                keys = torch.where(own < 0, stop, own)[:, None]
            tokens = sequence.tokens_at(start, stop)
            out[tokens] = attend_to(q[tokens], sequence, range(start, stop), keys, scale)
            start = stop
    return out


def written_sequences(k: Tensor, v: Tensor, small: Tensor, cache: Tensor, metadata: TokenRows) -> Iterator[Sequence]:
    """Write keys, values and small keys [tokens, size] to their slots, then yield the sequences of a step."""
    write(k, v, small, cache, metadata)
    for each in stored_sequences(cache, metadata):
        yield Sequence(each.store, each.table, each.block_size, 1, each.tokens, each.start, k.shape[1], k.shape[2])


def write(k: Tensor, v: Tensor, small: Tensor, cache: Tensor, metadata: TokenRows) -> None:
    """Write keys, values and small keys [tokens, size] to their slots."""
    slots, size = metadata.slot_mapping, metadata.block_size
    store = cache.view(len(cache), size, -1)
    store[slots // size, slots % size] = torch.cat((k.flatten(1), v.flatten(1), small), dim=1).to(store.dtype)


def workspace_bytes(kv_heads: int, dim: int, small_size: int, num_seen: int, max_length: int, num_tokens: int) -> int:
    """Return the most bytes that the reference and implementations allocate beside their output.

    num_seen: keys that a query attends to. max_length: tokens of the longest sequence. num_tokens: of a step.
    """
    # the reference widens keys and values; implementations copy them into tiles
    gathered = max(GATHERED_KEYS, num_seen, min(max_length, MOST_COPIES)) * kv_heads * (2 * 3 * 4 * dim + 4 * 8)
    scored = max(_SCORED_KEYS, max_length) * kv_heads * 3 * 4 + max_length * (small_size * 8 + 3 * 8)
    return gathered + scored + num_tokens * kv_heads * (2 * dim + small_size) * 8


def spans(start: int, end: int, by: BlockChoice) -> Iterator[tuple[int, int]]:
    """Cut the queries at positions [start, end) into spans that see equally many blocks."""
    while start < end:
        seen = start // by.width + 1
        step = by.width
        if seen > by.num_chosen:
            step = max(1, min(GATHERED_KEYS // (by.num_chosen * by.width), _SCORED_KEYS // (seen * by.width)))
        stop = min(end, seen * by.width, start + step)
        yield start, stop
        start = stop


def _attend(q: Tensor, small: Tensor, sequence: Sequence, positions: range, by: BlockChoice) -> Tensor:
    """Attend q [queries, heads, dim], which see equally many blocks, to the keys that they choose."""
    seen = positions.start // by.width + 1
    if seen <= by.num_chosen:
        keys = torch.arange(seen * by.width, device=q.device).expand(1, 1, -1)
    else:
        keys = chosen_keys(small, sequence, positions, by)
    return attend_to(q, sequence, positions, keys, by.scale)


def attend_to(
    q: Tensor, sequence: Sequence, positions: range, keys: Tensor, scale: float, biases: Tensor | None = None
) -> Tensor:
    """Attend q [queries, heads, dim] to keys at positions [queries or 1, kv_heads or 1, keys], none behind a query.

    biases: added to scores, float32 [queries, heads, keys], for a multiple of `KEY_TILE` keys.
    """
    queries = torch.arange(positions.start, positions.stop, device=q.device)[:, None, None]
    keys = F.pad(keys, (0, -keys.shape[2] % KEY_TILE), value=positions.stop)
    mask = torch.zeros((), device=q.device).masked_fill(keys > queries, float("-inf"))[:, :, None]
    # hidden keys are others: what lies there may be NaN, which a weight of zero would not hide
    keys = keys.clamp(max=positions.stop - 1)
    k, v = (sequence.heads(keys, each).float().expand(len(q), -1, -1, -1) for each in (0, 1))
    grouped = q.float().view(len(q), sequence.kv_heads, -1, sequence.dim)
    shared = grouped.shape[2]
    padded = F.pad(grouped, (0, 0, 0, -shared % 4))
    if biases is not None:
        mask = mask + F.pad(biases.view(*grouped.shape[:3], -1), (0, 0, 0, -shared % 4))
    out = F.scaled_dot_product_attention(padded, k, v, attn_mask=mask, scale=scale)
    return out[:, :, :shared].flatten(1, 2).to(q.dtype)


def chosen_keys(small: Tensor, sequence: Sequence, positions: range, by: BlockChoice) -> Tensor:
    """Return the positions of the blocks that queries choose, which see equally many; those behind them included.

    small [queries, kv_heads, size] → int64 [queries, kv_heads, num_chosen * width], in ascending order.
    """
    seen, device = positions.start // by.width + 1, small.device
    keys = torch.arange(seen * by.width, device=device)
    stored = sequence.small_keys(keys.clamp(max=positions.stop - 1))
    rows = small.float().flatten(0, 1)
    scores = torch.matmul(F.pad(rows, (0, 0, 0, -len(rows) % 4)), stored.t())[: len(rows)]
    queries = torch.arange(positions.start, positions.stop, device=device)[:, None, None]
    scores = scores.view(*small.shape[:2], -1).masked_fill(keys > queries, float("-inf"))
    best = scores.view(*small.shape[:2], seen, by.width).amax(dim=3)
    best[..., seen - min(by.num_recent, seen) :] = float("inf")
    blocks = best.topk(by.num_chosen, dim=2).indices.sort(dim=2).values
    return (blocks[..., None] * by.width + torch.arange(by.width, device=device)).flatten(2)


def _examples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Yield prompts and decode steps in one batch, whose queries see all blocks or choose some."""
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    for heads, kv_heads, dim, size, by in (
        (4, 2, 16, 8, BlockChoice(0.25, 4, 3, 1)),
        (6, 1, 24, 16, BlockChoice(0.3, 8, 2, 0)),
    ):
        num_tokens, block_size = 30, 16
        rows = example_rows((7, 1, 1, 21), (7, 40, 5, 50), block_size)
        cache = made(17, block_size * (2 * kv_heads * dim + size))
        q, k, v = made(num_tokens, heads, dim), made(num_tokens, kv_heads, dim), made(num_tokens, kv_heads, dim)
        yield q, k, v, (made(num_tokens, kv_heads, size), made(num_tokens, size)), cache, rows, by


def _chosen_examples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Yield queries that see all tokens and some that see a part of them, fewer than there is room for."""
    generator, block_size, rows = torch.Generator().manual_seed(1), 16, example_rows((7, 1, 1, 21), (7, 40, 5, 50), 16)
    for heads, kv_heads, dim, most in ((4, 2, 16, 35), (6, 1, 24, 9)):
        q, k, v = (torch.randn(30, each, dim, generator=generator).to(dtype) for each in (heads, kv_heads, kv_heads))
        chosen = torch.full((30, most), -1, dtype=torch.int32)
        first = 0
        for count, length in zip(rows.query_lengths, rows.lengths, strict=True):
            for place, position in enumerate(range(length - count, length), first):
                seen = torch.arange(position + 1, dtype=torch.int32)
                seen = seen if len(seen) <= most else seen[-(most - position % 3) :]
                chosen[place, : len(seen)] = seen
            first += count
        cache = torch.randn(17, block_size * 2 * kv_heads * dim, generator=generator).to(dtype)
        yield q, k, v, cache, rows, chosen, 0.25


OPERATORS = (
    Operator("block_sparse_attention", block_sparse_attention, _examples, trial=trial_on_copy),
    Operator("attend_chosen_keys", attend_chosen_keys, _chosen_examples, trial=trial_on_copy),
)
