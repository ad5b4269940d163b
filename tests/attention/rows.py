"""Random rows over a paged cache, and attention over them written down as slowly and plainly as possible."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.attention.metadata import AttentionMetadata


@dataclass(frozen=True)
class Rows:
    """A step over `rows` whose earlier tokens are already in the cache; `keys[i]`, `values[i]` are whole sequences."""

    metadata: AttentionMetadata
    q: Tensor
    k: Tensor
    v: Tensor
    cache: Tensor
    keys: list[Tensor]
    values: list[Tensor]


def make_rows(
    shape: list[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Rows:
    """Rows of (context, queries); blocks are dealt from a shuffled pool, so no table is contiguous."""
    torch.manual_seed(seed)
    blocks = [-(-(context + queries) // block_size) for context, queries in shape]
    pool = list(range(1, sum(blocks) + 4))
    random.Random(seed).shuffle(pool)
    tables = [[pool.pop() for _ in range(count)] for count in blocks]
    metadata = AttentionMetadata.build(
        [queries for _, queries in shape], [context + queries for context, queries in shape], tables, block_size
    )
    # what nobody wrote is loud, so that reading it shows
    cache = torch.full((2, sum(blocks) + 4, kv_heads, block_size, dim), 100.0, dtype=dtype)
    keys, values = ([torch.randn(sum(row), kv_heads, dim).to(dtype) for row in shape] for _ in range(2))
    for row, (context, _) in enumerate(shape):
        for position in range(context):
            block, offset = tables[row][position // block_size], position % block_size
            cache[0, block, :, offset], cache[1, block, :, offset] = keys[row][position], values[row][position]
    k, v = (
        torch.cat([whole[context:] for whole, (context, _) in zip(each, shape, strict=True)]) for each in (keys, values)
    )
    q = torch.randn(k.shape[0], heads, dim).to(dtype)
    return Rows(metadata, q, k, v, cache, keys, values)


def attend_slowly(
    rows: Rows,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    alibi: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention token by token and head by head in float64, without a cache."""
    heads, kv_heads = rows.q.shape[1], rows.k.shape[1]
    out = torch.empty(rows.q.shape, dtype=torch.float64)
    token = 0
    for row, queries in enumerate(rows.metadata.query_lengths):
        length = rows.metadata.lengths[row]
        for position in range(length - queries, length):
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(heads):
                shared = head // (heads // kv_heads)
                keys = rows.keys[row][first : position + 1, shared].double()
                scores = keys @ rows.q[token, head].double() * scale
                if soft_cap is not None:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                if alibi is not None:
                    scores = scores + alibi[head].double() * (torch.arange(first, position + 1) - position)
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head : head + 1].double()))
                weights = torch.softmax(scores, 0)[: position + 1 - first]
                out[token, head] = weights @ rows.values[row][first : position + 1, shared].double()
            token += 1
    return out.float()
