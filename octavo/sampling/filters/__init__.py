"""Which tokens may be drawn. One file per filter; `default_filters` lists them in the order in which they act.

They act after the temperature. All that are here keep an upper set of the distribution: every token at least as likely
as some boundary, so tokens that tie with the boundary stay. Used by the samplers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.core.sampling_params import SamplingParams
from octavo.sampling.filters.filter import Filter
from octavo.sampling.filters.min_p import MinP
from octavo.sampling.filters.top_k import TopK
from octavo.sampling.filters.top_p import HISTOGRAM_BYTES, TopP

__all__ = [
    "HISTOGRAM_BYTES",
    "Filter",
    "MinP",
    "TopK",
    "TopP",
    "default_filters",
    "filtered",
    "filtered_probabilities",
    "scale",
]


def default_filters() -> tuple[Filter, ...]:
    """Return the filters that sampling parameters can name."""
    return (MinP(), TopK(), TopP())


def scale(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Return logits over temperature, shifted so that the largest of each row is 0; a new tensor [rows, vocab]."""
    # shifted first: a small temperature then overflows towards -inf only
    scaled = logits - logits.amax(dim=-1, keepdim=True)
    if any(temperature != 1.0 for temperature in temperatures):
        scaled /= torch.tensor(temperatures, dtype=torch.float32, device=logits.device).unsqueeze(1)
    return scaled


def filtered_probabilities(
    scaled: Tensor, params: Sequence[SamplingParams], filters: Sequence[Filter] | None = None
) -> Tensor:
    """Return probabilities [rows, vocab] of what the filters (by default the default ones) keep, 0 elsewhere.

    `scaled` is from `scale` and is overwritten.
    """
    return torch.softmax(filtered(scaled, params, filters), dim=-1)


def filtered(scaled: Tensor, params: Sequence[SamplingParams], filters: Sequence[Filter] | None = None) -> Tensor:
    """Return `scaled` of `scale`, overwritten: -inf for what the filters (by default the default ones) drop."""
    for each in default_filters() if filters is None else filters:
        rows = [row for row, one in enumerate(params) if each.needs(one)]
        if len(rows) == len(params):
            each.drop(scaled, params)
        elif rows:
            chosen = scaled[rows]
            each.drop(chosen, [params[row] for row in rows])
            scaled[rows] = chosen
    return scaled
