"""Reads what a cache keeps of tokens, where it lies token by token."""

from __future__ import annotations

from math import gcd

from torch import Tensor


def stored_rows(store: Tensor, blocks: Tensor, places: Tensor, begin: Tensor | int, size: int) -> Tensor:
    """Return the values from `begin` on of tokens in a store [blocks, tokens of a block, values], which is dense but
    for its blocks: [..., size] for int64 blocks and places [...].

    begin: a number, or multiples of `size`. Whole rows are copied; torch's indexing of several axes copies value by
    value.
    """
    first = blocks * store.stride(0) + places * store.stride(1) + begin
    step = gcd(*store.stride()[:2], size, begin if isinstance(begin, int) else 0)
    num_values = (len(store) - 1) * store.stride(0) + store[0].numel()
    rows = store.as_strided(((num_values - size) // step + 1, size), (step, 1))
    return rows.index_select(0, (first // step).flatten()).view(*first.shape, size)
