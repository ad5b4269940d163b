"""Which tokens may be drawn: min-p, top-k and top-p, in this order, after the temperature.

Every filter keeps an upper set of the distribution: all tokens at least as likely as some boundary, so tokens that tie
with the boundary stay, and one token always remains. top-p counts the mass of what min-p and top-k have left.
"""

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
"""What the histogram of one row takes, with its running sums."""


def is_filtered(params: SamplingParams) -> bool:
    """True when one of the filters can drop a token."""
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def scale(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Logits over temperature, shifted so that the largest of each row is 0; a new tensor [rows, vocab]."""
    # shifted first: a small temperature then overflows towards -inf only
    scaled = logits - logits.amax(dim=-1, keepdim=True)
    if any(temperature != 1.0 for temperature in temperatures):
        scaled /= torch.tensor(temperatures, dtype=torch.float32, device=logits.device).unsqueeze(1)
    return scaled


def filtered_probabilities(scaled: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Probabilities [rows, vocab] of what the filters keep, 0 elsewhere. `scaled` is from `scale` and is overwritten.

    A row that top-p cut does not sum to 1: its entries keep their proportions, which is all that a draw needs.
    """
    boundaries = _logit_boundaries(scaled, params)
    if boundaries is not None:
        scaled.masked_fill_(scaled < boundaries.unsqueeze(1), -math.inf)
    probabilities = torch.softmax(scaled, dim=-1)
    limited = [row for row, each in enumerate(params) if each.top_p < 1.0]
    if limited:
        _apply_top_p(probabilities, limited, [params[row].top_p for row in limited])
    return probabilities


def _logit_boundaries(scaled: Tensor, params: Sequence[SamplingParams]) -> Tensor | None:
    """Smallest logit [rows] that min-p and top-k keep, None when no row has either."""
    vocab_size = scaled.shape[1]
    limited = [row for row, each in enumerate(params) if 0 < each.top_k < vocab_size]
    if not limited and all(each.min_p == 0.0 for each in params):
        return None
    boundaries = torch.tensor(
        [math.log(each.min_p) if each.min_p > 0.0 else -math.inf for each in params],
        dtype=torch.float32,
        device=scaled.device,
    )
    if limited:
        rows = torch.tensor(limited, device=scaled.device)
        counts = [params[row].top_k for row in limited]
        chosen = scaled if len(limited) == len(params) else scaled[rows]
        largest = torch.topk(chosen, max(counts), dim=-1).values
        smallest_kept = largest.gather(1, torch.tensor(counts, device=scaled.device).unsqueeze(1) - 1).squeeze(1)
        boundaries[rows] = torch.maximum(boundaries[rows], smallest_kept)
    return boundaries


def _apply_top_p(probabilities: Tensor, rows: list[int], top_p: list[float]) -> None:
    """Set to 0, in place, what lies outside the smallest upper set whose mass reaches `top_p`."""
    vocab_size = probabilities.shape[1]
    everything = len(rows) == probabilities.shape[0]
    index = torch.tensor(rows, device=probabilities.device)
    chosen = probabilities if everything else probabilities[index]
    wanted = torch.tensor(top_p, dtype=torch.float64, device=probabilities.device)
    # all tokens below (1 - top_p) / vocab weigh less than 1 - top_p together: the boundary is not among them (half of
    # it, to be clear of rounding)
    floor = ((1.0 - wanted) / (2 * vocab_size)).float().unsqueeze(1)
    boundaries = _top_p_boundaries(chosen, chosen >= floor, wanted)
    chosen.masked_fill_(chosen < boundaries.unsqueeze(1), 0.0)
    if not everything:
        probabilities[index] = chosen


def _top_p_boundaries(probabilities: Tensor, candidates: Tensor, wanted: Tensor) -> Tensor:
    """Smallest probability kept in each row, float32 [rows].

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
    """Row and value of each entry that `mask` selects, row by row."""
    row_of, column_of = mask.nonzero(as_tuple=True)
    return row_of, matrix[row_of, column_of]


def _pad_rows(values: Tensor, row_of: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Values grouped by ascending row as a matrix [rows, longest] padded with 0, and the number of values [rows]."""
    counts = torch.bincount(row_of, minlength=num_rows)
    starts = counts.cumsum(0) - counts
    column = torch.arange(len(values), device=values.device).sub_(starts[row_of])
    padded = values.new_zeros((num_rows, max(int(counts.max()), 1)))
    padded[row_of, column] = values
    return padded, counts
