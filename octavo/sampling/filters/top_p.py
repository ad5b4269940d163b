"""`top_p`: the smallest set of the likeliest tokens whose mass reaches it is kept."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.core.sampling_params import SamplingParams

# Leading bits of a positive float32: sign, exponent, three bits of mantissa. Their order is the order of the values.
_BIN_SHIFT = 20
_NUM_BINS = 1 << (31 - _BIN_SHIFT)

HISTOGRAM_BYTES = 4 * 8 * _NUM_BINS
"""Bytes of the histogram of one row, with its running sums."""


class TopP:
    """Keeps the smallest set of likeliest tokens whose mass reaches `top_p`, and those that tie with the last of them.

    The mass is that of the tokens which the filters before it have kept.
    """

    name = "top_p"

    def needs(self, params: SamplingParams) -> bool:
        return params.top_p < 1.0

    def drop(self, scaled: Tensor, params: Sequence[SamplingParams]) -> None:
        probabilities = torch.softmax(scaled, dim=-1)
        wanted = torch.tensor([each.top_p for each in params], dtype=torch.float64, device=scaled.device)
        # all tokens below (1 - top_p) / vocab weigh less than 1 - top_p together: the boundary is not among them (half
        # of it, to be clear of rounding)
        floor = ((1.0 - wanted) / (2 * scaled.shape[1])).float().unsqueeze(1)
        boundaries = _boundaries(probabilities, probabilities >= floor, wanted)
        scaled.masked_fill_(probabilities < boundaries.unsqueeze(1), -math.inf)


def _boundaries(probabilities: Tensor, candidates: Tensor, wanted: Tensor) -> Tensor:
    """Return the smallest probability kept in each row, float32 [rows].

    No sort of the vocabulary: a histogram over the leading bits finds the bin that holds the boundary, and only the
    tokens of that bin are sorted. All sums run in an order that depends on the row alone: neighbours change nothing.
    """
    num_rows = probabilities.shape[0]
    row_of, values = _selected(probabilities, candidates)
    bins = values.view(torch.int32) >> _BIN_SHIFT
    masses = torch.bincount(row_of * _NUM_BINS + bins, weights=values.double(), minlength=num_rows * _NUM_BINS)
    # mass of each bin and all likelier ones, likeliest bin first
    reached = masses.view(num_rows, _NUM_BINS).flip(1).cumsum_(dim=1)
    crossing = (reached < wanted.unsqueeze(1)).sum(dim=1)
    found = crossing < _NUM_BINS
    crossing.clamp_(max=_NUM_BINS - 1)
    above = reached.gather(1, (crossing - 1).clamp_(min=0).unsqueeze(1)).squeeze(1)
    above = torch.where(crossing > 0, above, 0.0)
    inside = bins == (_NUM_BINS - 1 - crossing).to(torch.int32)[row_of]
    values, row_of = values[inside], row_of[inside]
    del masses, reached, bins, inside
    padded, counts = _pad_rows(values, row_of, num_rows)
    del values, row_of
    ordered = padded.sort(dim=1, descending=True).values
    # the mass above each entry: what comes before it in its bin, and the likelier bins
    before = ordered.cumsum(dim=1, dtype=torch.float64).sub_(ordered).add_(above.unsqueeze(1))
    num_kept = torch.minimum((before < wanted.unsqueeze(1)).sum(dim=1), counts).clamp_(min=1)
    smallest = ordered.gather(1, num_kept.unsqueeze(1) - 1).squeeze(1)
    # rounding can leave the total short of a top_p next to 1: then nothing is cut
    return torch.where(found, smallest, 0.0)


def _selected(matrix: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row and the value of each entry that `mask` selects, row by row."""
    row_of, column_of = mask.nonzero(as_tuple=True)
    return row_of, matrix[row_of, column_of]


def _pad_rows(values: Tensor, row_of: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return values grouped by ascending row as a matrix [rows, longest] padded with 0, and the number of values
    [rows]."""
    counts = torch.bincount(row_of, minlength=num_rows)
    starts = counts.cumsum(0) - counts
    column = torch.arange(len(values), device=values.device).sub_(starts[row_of])
    padded = values.new_zeros((num_rows, max(int(counts.max()), 1)))
    padded[row_of, column] = values
    return padded, counts
