"""Attention whose scores have products of queries with learned profiles of the distance of query and key.

What a query adds up, and in which order, depends on its position alone. Source: Thinking Machines' releases.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from octavo.ops.block_sparse import GATHERED_KEYS, KEY_TILE, attend_to, written_sequences
from octavo.ops.recurrent import TokenRows, trial_on_copy
from octavo.ops.registry import Operator
from octavo.ops.stored_rows import example_rows


def relative_attention(
    q: Tensor,
    new: tuple[Tensor, Tensor],
    profiled: tuple[Tensor, Tensor],
    cache: Tensor,
    metadata: TokenRows,
    scale: float,
    window: int | None,
) -> Tensor:
    """Write keys to their slots, then let every query see its own sequence up to itself, or `window` tokens of it.

    q is [tokens, heads, dim], `new` the keys and values [tokens, kv_heads, dim], `profiled` factors [tokens, heads,
    rank] and profiles [rank, extent]. The score of a key fewer than `extent` tokens before the query has `factors ·
    profiles[:, distance]` added to its product times `scale`. `cache` [blocks, values] is the layer's, with key and
    value of each token one after the other; it is updated in place. The result is [tokens, heads, dim].
    """
    out = torch.zeros_like(q)
    if q.is_meta:
        return out
    for sequence in written_sequences(*new, q.new_empty(len(q), 0), cache, metadata):
        start = sequence.start
        while start < sequence.length:
            tile = start // KEY_TILE * KEY_TILE
            first, end = max(0, tile + 1 - (window or tile + 1)) // KEY_TILE * KEY_TILE, tile + KEY_TILE
            stop = min(sequence.length, end, start + max(1, GATHERED_KEYS // (end - first)))
            tokens, keys = sequence.tokens_at(start, stop), torch.arange(first, end, device=q.device)
            distance = torch.arange(start, stop, device=q.device)[:, None] - keys
            biases = _biases(profiled[0][tokens].float(), profiled[1].float(), distance, window)
            # keys that the window hides are others: their block may be gone
            seen = keys.clamp(min=max(0, start - (window or end) + 1))[None, None]
            out[tokens] = attend_to(q[tokens], sequence, range(start, stop), seen, scale, biases)
            start = stop
    return out


def _biases(factors: Tensor, profiles: Tensor, distance: Tensor, window: int | None) -> Tensor:
    """Return what is added to scores, [queries, heads, keys], of distances [queries, keys]; -inf for hidden keys."""
    extent = profiles.shape[1]
    near, total = distance.clamp(0, extent - 1), factors.new_zeros(*factors.shape[:2], distance.shape[1])
    for rank, profile in enumerate(profiles):  # one by one: a sum in one order
        total += factors[:, :, rank, None] * profile[near][:, None]
    total.masked_fill_((distance >= extent)[:, None], 0.0)
    return total if window is None else total.masked_fill_((distance >= window)[:, None], -torch.inf)


def _examples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Yield prompts and decode steps in one batch, with and without a window."""
    generator, rows = torch.Generator().manual_seed(2), example_rows((7, 1, 1, 21), (7, 40, 5, 50), 16)
    for heads, kv_heads, dim, extent, window in ((4, 2, 16, 20, None), (6, 1, 24, 9, 9)):
        of_tokens = [(30, each, size) for each, size in ((heads, dim), (kv_heads, dim), (kv_heads, dim), (heads, 3))]
        sizes = (*of_tokens, (3, extent), (17, 16 * 2 * kv_heads * dim))
        q, k, v, factors, profiles, cache = (torch.randn(each, generator=generator).to(dtype) for each in sizes)
        yield q, (k, v), (factors, profiles), cache, rows, dim**-0.5, window


OPERATORS = (Operator("relative_attention", relative_attention, _examples, trial=trial_on_copy),)
