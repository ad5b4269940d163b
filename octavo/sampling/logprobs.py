"""Makes the log-probabilities that callers get: of the model's own distribution, before processors and filters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.core.step import TokenLogprobs


def token_logprobs(
    logprobs: Tensor, rows: Sequence[int], token_ids: Sequence[int], wanted: Sequence[int | None]
) -> list[TokenLogprobs]:
    """Describe `token_ids[i]` under row `rows[i]` of `logprobs`, float32 [rows, vocab]; `rows` do not fall.

    wanted[i]: how many of the likeliest tokens to list; 0 gives only rank and log-probability, None no rank either.
    """
    device = logprobs.device
    row_index = torch.tensor(rows, device=device)
    chosen = logprobs[row_index, torch.tensor(token_ids, device=device)]
    values: list[float] = chosen.tolist()
    results = [
        TokenLogprobs(token_id=token_id, logprob=value) for token_id, value in zip(token_ids, values, strict=True)
    ]
    # one look-up per count, not one for the largest: which of several tied tokens are listed may depend on the count,
    # and must not depend on what the neighbours asked for
    for count in {each for each in wanted if each is not None}:
        draws = [i for i, each in enumerate(wanted) if each == count]
        ranks, top_ids, top_values = _likeliest(logprobs, row_index[draws], chosen[draws], count)
        for i, rank, ids, likeliest in zip(draws, ranks, top_ids, top_values, strict=True):
            results[i] = TokenLogprobs(
                token_id=token_ids[i],
                logprob=values[i],
                rank=rank,
                top_ids=tuple(ids),
                top_logprobs=tuple(likeliest),
            )
    return results


def ranked_tokens(ids: list[int], scores: list[float], logprobs: list[float]) -> TokenLogprobs:
    """Return the candidates of a beam, by falling score, with the model's log-probabilities (-inf where barred)."""
    logprobs = [logprob if score > -math.inf else score for logprob, score in zip(logprobs, scores, strict=True)]
    return TokenLogprobs(
        token_id=ids[0],
        logprob=logprobs[0],
        top_ids=tuple(ids),
        top_logprobs=tuple(logprobs),
        scores=() if scores == logprobs else tuple(scores),
    )


def _likeliest(
    logprobs: Tensor, rows: Tensor, values: Tensor, count: int
) -> tuple[list[int], list[list[int]], list[list[float]]]:
    """Return the rank of each of `values` [draws] in its row, and the `count` likeliest ids there with their values."""
    # many draws may share a row (n > 1), which is searched once
    distinct, place = torch.unique(rows, return_inverse=True)
    selected = logprobs if len(distinct) == len(logprobs) else logprobs[distinct]
    if len(distinct) == len(rows):
        ranks = (selected > values.unsqueeze(1)).sum(dim=1)
    else:
        ranks = torch.stack([(selected[row] > value).sum() for row, value in zip(place.tolist(), values, strict=True)])
    rank_list: list[int] = (ranks + 1).tolist()
    if count == 0:
        return rank_list, [[]] * len(values), [[]] * len(values)
    top = torch.topk(selected, min(count, logprobs.shape[1]), dim=-1, sorted=True)
    return rank_list, top.indices[place].tolist(), top.values[place].tolist()
