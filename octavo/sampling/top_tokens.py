"""Applies the filters to the likeliest few tokens of a row, which hold nearly all of a real distribution.

Most rows are decided here, without the rest of the vocabulary; the others go to `filtered_probabilities`. Whether a row
can be decided depends on that row and its parameters alone, so every batch treats it alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.core.sampling_params import SamplingParams
from octavo.sampling.filters import MinP, TopK, TopP

DECIDED_BY_TOP_TOKENS = (MinP, TopK, TopP)
"""The filters of which `filtered_top_tokens` is an implementation."""


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The likeliest tokens of some rows."""

    token_ids: Tensor
    """int64 [rows, top]."""
    weights: Tensor
    """float32 [rows, top]: in proportion to the probability, 0 for what the filters drop."""
    is_decided: list[bool]
    """Per row: True when the filters keep nothing but these tokens. The weights of other rows are undefined."""


def num_top_tokens(vocab_size: int) -> int:
    """Return how many of the likeliest tokens are examined: few enough for one pass over the row to find them."""
    return min(vocab_size, 256, max(32, vocab_size // 64))


def filtered_top_tokens(scaled: Tensor, params: Sequence[SamplingParams]) -> TopTokens:
    """Apply min-p, top-k and top-p, in this order, to the likeliest tokens of `scaled`, float32 [rows, vocab].

    `scaled` is what `scale` returns.
    """
    size = num_top_tokens(scaled.shape[1])
    values, token_ids = torch.topk(scaled, size, dim=-1)
    lowest = values[:, -1]
    boundaries = _boundaries(values, params)
    # a boundary above the lowest value: all that it keeps, ties included, is among these
    is_bounded = boundaries > lowest
    dropped = values < boundaries.unsqueeze(1)
    weights = torch.softmax(values.masked_fill(dropped, -math.inf), dim=-1)
    nucleus = torch.tensor([each.top_p for each in params], dtype=torch.float64, device=scaled.device)
    totals = weights.cumsum(dim=1, dtype=torch.float64)
    mass = totals[:, -1].clone()
    is_free = torch.tensor([each.top_k <= 0 and each.min_p == 0.0 for each in params], device=scaled.device)
    free = is_free.nonzero().squeeze(1)
    if len(free):
        # top-p alone counts the mass of the whole row, here in units of theirs
        whole_row = torch.softmax(scaled if len(free) == len(params) else scaled[free], dim=-1)
        mass[free] = weights[free, 0].double() / whole_row.amax(dim=-1).double()
    is_kept = totals - weights < (nucleus * mass).unsqueeze(1)
    num_kept = is_kept.sum(dim=1).clamp_(min=1)
    smallest = weights.gather(1, num_kept.unsqueeze(1) - 1)
    is_limited = nucleus < 1.0
    is_cut = is_limited & (smallest.squeeze(1) > weights[:, -1])
    is_decided = is_bounded | (is_free & is_cut) | (size == scaled.shape[1])
    weights = weights.masked_fill(is_limited.unsqueeze(1) & (weights < smallest), 0.0)
    return TopTokens(token_ids, weights, is_decided.tolist())


def _boundaries(values: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return the smallest values [rows] that min-p and top-k keep of `values` [rows, top]; -inf for no limit."""
    boundaries = torch.tensor(
        [math.log(each.min_p) if each.min_p > 0.0 else -math.inf for each in params],
        dtype=torch.float32,
        device=values.device,
    )
    limited = [row for row, each in enumerate(params) if 0 < each.top_k <= values.shape[1]]
    if limited:
        columns = [params[row].top_k - 1 for row in limited]
        boundaries[limited] = torch.maximum(boundaries[limited], values[limited, columns])
    return boundaries
