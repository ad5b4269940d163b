"""Attention over latents of tokens that each query chooses by small keys of their own.

A query scores every token up to itself: the sum over the small heads of a weight times the product of query and small
key, where that is positive. It attends to the `count` tokens with the highest scores; of equal scores the earlier token
is taken. A query that sees no more tokens attends to all of them.

Everything of a query is computed for it alone, in shapes that its position fixes: so nothing that a step computes
besides changes its choice or a sum.

Sources: https://arxiv.org/abs/2512.02556 (DeepSeek V3.2), https://arxiv.org/abs/2602.15763 (GLM-5).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.recurrent import TokenRows, trial_on_copy
from octavo.ops.registry import Operator
from octavo.ops.stored_rows import example_rows, stored_sequences

GATHERED_TOKENS: Final = 1 << 14
"""Most latents that are gathered at once; those of one query may be more."""
MOST_SCORES: Final = 1 << 22
"""Most scores that an implementation has at once; those of one query may be more."""
_PRODUCTS: Final = 1 << 20
"""Most products of small queries and keys at once."""
_KEY_TILE: Final = 32
"""Queries attend to a multiple of this many latents, the hidden ones included, as in the reference of attention."""


class SmallHeads(NamedTuple):
    """The small queries, weights and keys by which tokens choose."""

    queries: Tensor
    """[tokens, heads, size]"""
    weights: Tensor
    """float32 [tokens, heads]"""
    keys: Tensor
    """[tokens, size]"""


def store(values: Tensor, cache: Tensor, metadata: TokenRows, begin: int) -> None:
    """Write values [tokens, n] to the slots of a step in a cache [blocks, values], from the value `begin` on.

    Nothing is written for values [0, n].
    """
    if not len(values):
        return
    slots, size = metadata.slot_mapping, metadata.block_size
    kept = cache.view(len(cache), size, -1)
    kept[slots // size, slots % size, begin : begin + values.shape[1]] = values.to(cache.dtype)


def choose_tokens(small: SmallHeads, cache: Tensor, metadata: TokenRows, count: int) -> Tensor:
    """Write small keys to their slots, and return which tokens every query attends to, itself included.

    `cache` [blocks, values] is the layer's, whose last values of each token are its small key; it is updated in place.
    The result, int32 [tokens, count], has positions in ascending order; of a query that sees fewer tokens, all of them
    and then its own again.
    """
    queries, weights, keys = small
    chosen = torch.empty(len(queries), count, dtype=torch.int32, device=queries.device)
    if queries.is_meta:
        return chosen
    size, step = keys.shape[1], max(1, _PRODUCTS // queries.shape[1])
    num_values = cache.view(len(cache), metadata.block_size, -1).shape[2]
    store(keys, cache, metadata, num_values - size)
    positions = torch.arange(max((count, *metadata.lengths)), dtype=torch.int32, device=queries.device)
    for each in stored_sequences(cache, metadata):
        stored = None
        for token, position in zip(each.tokens, range(each.start, each.length), strict=True):
            if position < count:
                chosen[token] = positions[:count].clamp(max=position)
                continue
            if stored is None:
                stored = each.rows(positions[: each.length].long(), num_values - size, size).float()
            # a copy begins where every other one does: products may depend on the alignment of their factors
            query, weight = (given[token].to(torch.float32, copy=True) for given in (queries, weights))
            parts = torch.split(stored[: position + 1], step)
            scores = torch.cat([torch.mv(torch.mm(part, query.t()).relu_(), weight) for part in parts])
            chosen[token] = positions[: position + 1][_is_best(scores, count)]
    return chosen


def _is_best(scores: Tensor, count: int) -> Tensor:
    """Return bool [n]: whether a score is among the `count` highest of [n], of equal ones the first. NaN is highest."""
    scores = scores.nan_to_num(torch.inf, torch.inf, -torch.inf)
    least = scores.topk(count, sorted=False).values.amin()
    above, equal = scores > least, scores == least
    return above | (equal & (equal.cumsum(0) <= count - above.sum()))


def attend_chosen(
    q: tuple[Tensor, Tensor],
    latents: tuple[Tensor, Tensor],
    cache: Tensor,
    metadata: TokenRows,
    chosen: Tensor,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Write latents to their slots, then let every query attend to the tokens that it chose.

    q is [tokens, heads, value_size] and [tokens, heads, rest], `latents` [tokens, value_size] and [tokens, rest];
    `chosen` is what `choose_tokens` returns, or `choose_pools`, where numbers below 0 are no tokens. `cache` [blocks,
    values] is the layer's, whose first values of each token are its latent; it is updated in place. Where `latents` are
    of no tokens, nothing is written: another layer has filled the cache. sinks: float32 [heads], one more score of
    every query, which takes part in the softmax and has no value. The result is [tokens, heads, value_size].
    """
    out = torch.zeros_like(q[0], memory_format=torch.contiguous_format)
    if out.is_meta:
        return out
    value_size, count = out.shape[2], chosen.shape[1]
    store(torch.cat(latents, dim=1), cache, metadata, 0)
    queries = F.pad(torch.cat(q, dim=2), (0, 0, 0, -out.shape[1] % 4)).float()
    for each in stored_sequences(cache, metadata):
        for start, stop, width in _spans(each.start, each.length, count):
            tokens = each.tokens_at(start, stop)
            seen = torch.arange(start, stop, device=out.device)[:, None].clamp(max=count - 1)
            positions = F.pad(chosen[tokens, :width].long(), (0, max(0, width - count)))
            hidden = (torch.arange(width, device=out.device) > seen) | (positions < 0)
            mask = torch.zeros((), device=out.device).masked_fill(hidden, -torch.inf)
            positions = positions.clamp(min=0)
            found = each.rows(positions.flatten(), 0, queries.shape[2]).float()
            keys, mask = found.view(stop - start, 1, width, -1), mask[:, None, None]
            if sinks is not None:
                keys, mask = _with_sinks(keys, mask, F.pad(sinks, (0, queries.shape[1] - len(sinks))))
            # the rest is attended to as well, and cut off
            sums = F.scaled_dot_product_attention(queries[tokens, None], keys, keys, attn_mask=mask, scale=scale)
            out[tokens] = sums[:, 0, : out.shape[1], :value_size].to(out.dtype)
    return out


def _with_sinks(keys: Tensor, mask: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys [queries, 1, width, size] and mask [queries, 1, 1, width] with a key of zeros more, whose scores are
    `sinks` [heads], and hidden ones behind it."""
    width = keys.shape[2]
    mask = F.pad(mask.repeat(1, 1, len(sinks), 1), (0, _KEY_TILE), value=-torch.inf)
    mask[..., width] = sinks
    return F.pad(keys, (0, 0, 0, _KEY_TILE)), mask


def workspace_bytes(size: int, index_size: int, count: int, max_length: int, max_tokens: int, num_heads: int) -> int:
    """Return the most bytes that both references and implementations allocate beside their outputs.

    size: of a latent. count: tokens that a query chooses. max_length: tokens of the longest sequence. max_tokens: of a
    step. num_heads: of attention.
    """
    scored = max_length * (index_size * (4 + 4) + 64) + 2 * 4 * _PRODUCTS + 4 * max(MOST_SCORES, max_length)
    gathered = max(GATHERED_TOKENS, count) * (size * (4 + 4 + 4) + 64)
    return scored + gathered + max_tokens * (count * 4 + (num_heads + 4) * size * 3 * 4)


def _spans(start: int, end: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Cut the queries at positions [start, end) into (start, stop, how many latents they are attended to with)."""
    while start < end:
        width = -(-min(start + 1, count) // _KEY_TILE) * _KEY_TILE
        stop = min(end, start + max(1, GATHERED_TOKENS // width))
        if width < count:
            stop = min(stop, width)
        yield start, stop, width
        start = stop


class _Example(NamedTuple):
    """Prompts and decode steps in one batch, whose queries see all tokens or choose some."""

    q: tuple[Tensor, Tensor]
    latents: tuple[Tensor, Tensor]
    small: SmallHeads
    cache: Tensor
    rows: TokenRows
    num_chosen: int


def _made(dtype: torch.dtype) -> Iterator[_Example]:
    for value_size, rest, heads, index_heads, size, num_chosen in (16, 8, 4, 3, 8, 12), (40, 24, 6, 8, 16, 33):
        yield _example(dtype, (heads, value_size, rest), (index_heads, size), num_chosen)


def _example(dtype: torch.dtype, sizes: tuple[int, int, int], index: tuple[int, int], num_chosen: int) -> _Example:
    (heads, value_size, rest), (index_heads, size) = sizes, index
    generator = torch.Generator().manual_seed(value_size)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    rows, tokens = example_rows((7, 1, 1, 21), (7, 60, 5, 70), 16), 30
    small = SmallHeads(made(tokens, index_heads, size), made(tokens, index_heads).float(), made(tokens, size))
    q, latents = [(made(tokens, *each, value_size), made(tokens, *each, rest)) for each in ((heads,), ())]
    return _Example(q, latents, small, made(1 + 5 * 4, 16 * (value_size + rest + size)), rows, num_chosen)


def _choices(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for each in _made(dtype):
        yield each.small, each.cache, each.rows, each.num_chosen


def _attended(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for each in _made(dtype):
        chosen = choose_tokens(each.small, each.cache, each.rows, each.num_chosen)
        yield each.q, each.latents, each.cache, each.rows, chosen, 0.2
        none = each.latents[0][:0], each.latents[1][:0]
        yield each.q, none, each.cache, each.rows, chosen, 0.2
        yield each.q, each.latents, each.cache, each.rows, chosen, 0.2, torch.linspace(-1.0, 2.0, each.q[0].shape[1])


OPERATORS = (
    Operator("choose_tokens", choose_tokens, _choices, trial=trial_on_copy),
    Operator("attend_chosen", attend_chosen, _attended, trial=trial_on_copy),
)
