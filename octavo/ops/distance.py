"""Attention of whole prompts whose scores depend on the distance of key and query.

Each prompt is computed on its own, in pieces that follow from its length alone, so its bits depend on nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.registry import Operator

MOST_SCORES: Final = 1 << 22
"""Most scores of a piece, unless a single query has more."""


def distance_attention(q: Tensor, k: Tensor, v: Tensor, biases: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Let each token of a prompt see all of it: q, k, v [tokens, heads, dim] → [tokens, heads, dim].

    lengths: tokens of each prompt. biases: float32 [heads, 2 · reach + 1], which is added to the score of a key that
    stands -reach to reach tokens behind the query; those that are farther away have the bias of `reach`.
    """
    prompts = zip(*(torch.split(each, list(lengths)) for each in (q, k, v)), strict=True)
    return torch.cat([_of_prompt(own_q, own_k, own_v, biases, scale) for own_q, own_k, own_v in prompts])


def _of_prompt(q: Tensor, k: Tensor, v: Tensor, biases: Tensor, scale: float) -> Tensor:
    """q, k, v [length, heads, dim] → the same shape."""
    length, heads, _ = q.shape
    q, k, v = (each.transpose(0, 1)[None].contiguous() for each in (q, k, v))
    reach, step = biases.shape[1] // 2, max(1, MOST_SCORES // (heads * length))
    distances = torch.arange(1 - length, length, device=q.device).clamp_(-reach, reach) + reach
    # row r: what query length - 1 - r adds to the keys
    rows = biases[:, distances].to(q.dtype).unfold(1, length, 1)
    pieces = []
    for start in range(0, length, step):
        stop = min(start + step, length)
        added = rows[:, length - stop : length - start].flip(1)
        pieces.append(F.scaled_dot_product_attention(q[:, :, start:stop], k, v, added[None], scale=scale))
    return torch.cat(pieces, dim=2)[0].transpose(0, 1).contiguous()


def disentangled_attention(
    content: tuple[Tensor, Tensor, Tensor],
    places: tuple[Tensor, Tensor],
    rows: Tensor,
    lengths: Sequence[int],
    scale: float,
) -> Tensor:
    """Let each token of a prompt see all of it: [tokens, heads, dim].

    content: q, k, v [tokens, heads, dim]. places: queries and keys of distances, [places, heads, dim]. rows: int64
    [2 · reach + 1] on the host, ascending: the place of a query that stands -reach to reach tokens behind the key;
    prompts have at most reach + 1 tokens. The score is (q·k + q·place_k + place_q·k) · scale. lengths: tokens of each
    prompt. Source: He et al., https://arxiv.org/abs/2006.03654.
    """
    found, start, reach = [], 0, len(rows) // 2
    for length in lengths:
        q, k, v = (each[start : start + length].transpose(0, 1)[None].contiguous() for each in content)
        own = rows[reach + 1 - length : reach + length].to(q.device)
        place_q, place_k = (each[own].permute(1, 2, 0)[None] for each in places)  # [1, heads, dim, distances]
        backwards, width = place_k.flip(3), 2 * length - 1
        of_keys = k @ place_q  # [1, heads, keys, distances]
        step, pieces = max(1, MOST_SCORES // (q.shape[1] * width)), []
        for begin in range(0, length, step):
            piece = q[:, :, begin : begin + step]
            of_queries = piece @ backwards
            # a row further down, the same distance is a column further on: the other way for keys
            shape = 1, q.shape[1], piece.shape[2], length
            own_q, own_k = (each.stride()[:2] for each in (of_queries, of_keys))
            added = of_queries.as_strided(shape, (*own_q, width - 1, 1), length - 1 - begin)
            added = added + of_keys.as_strided(shape, (*own_k, 1, width - 1), length - 1 + begin)
            pieces.append(F.scaled_dot_product_attention(piece, k, v, added * scale, scale=scale))
        found.append(torch.cat(pieces, dim=2)[0].transpose(0, 1).contiguous())
        start += length
    return torch.cat(found)


def _examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, list[int], float]]:
    """Yield prompts within the reach of the biases and beyond it, and of one token."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = torch.randn(3, 30, 2, 16, generator=generator).to(dtype)
    yield q, k, v, torch.randn(2, 9, generator=generator), [3, 1, 26], 0.25


def _disentangled(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Yield prompts whose farther distances share places."""
    generator = torch.Generator().manual_seed(4)
    content = tuple(torch.randn(3, 30, 2, 16, generator=generator).to(dtype))
    places = tuple(torch.randn(2, 11, 2, 16, generator=generator).to(dtype))
    yield content, places, torch.arange(-25, 26).clamp(-5, 5) + 5, [3, 1, 26], 0.25


OPERATORS = (
    Operator("distance_attention", distance_attention, _examples),
    Operator("disentangled_attention", disentangled_attention, _disentangled),
)
