"""Computes log-probabilities on the GPU. A row's bits do not depend on the others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from octavo.core.step import TokenLogprobs
from octavo.devices.cuda.draws import BLOCK, GROUP
from octavo.devices.cuda.runtime import Launcher

_ONE: Final = float(1 << 42)
"""The mass of the likeliest token in the kernel."""


def described(
    logits: Tensor, largest: Tensor, places: Tensor, token_ids: Tensor, num_top: int, launch: Launcher
) -> Tensor:
    """Return lines for `tokens_of`, float64 [tokens, 2 + 2 · num_top], without waiting for the device: log-probability
    and rank of token_ids[i], int64 [tokens], in row places[i] of `logits`, the ids of the likeliest tokens there, in
    falling order and of equal ones the smallest first, and their log-probabilities.

    logits: float32 [rows, vocab]. largest: float32 [rows]. Log-probabilities are rounded once, and NaN where logits are
    not numbers.
    """
    (num_rows,), num_columns, device = places.shape, logits.shape[1], logits.device
    num_groups = -(-num_columns // GROUP)
    keys = torch.empty((num_rows, num_groups, GROUP), dtype=torch.int64, device=device)
    nearest = torch.empty((num_rows, num_groups), dtype=torch.int64, device=device)
    # of an even number of rows, so that both begin at whole vectors: other addresses take another kernel
    masses, ahead = torch.zeros((2, num_rows + num_rows % 2), dtype=torch.int64, device=device)[:, :num_rows]
    chosen, peaks = logits[places, token_ids], largest[places]
    launch(
        "logprobs.survey",
        (num_rows, -(-num_columns // BLOCK)),
        *(logits, places, peaks.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0), chosen, keys, nearest, masses, ahead),
        *(num_columns, num_groups, logits.stride(0)),
        BLOCK=BLOCK,
        GROUP=GROUP,
    )
    if 0 < num_top < num_groups:
        # the likeliest tokens are in as many groups, those with the largest keys
        groups = nearest.topk(num_top).indices
        keys = keys.gather(1, groups.unsqueeze(2).expand(-1, -1, GROUP))
    top_ids = -keys.flatten(1).topk(num_top).values & 0xFFFFFFFF
    totals = (masses.double() / _ONE).log().masked_fill(~peaks.isfinite(), math.nan)
    values = torch.cat((chosen.unsqueeze(1), logits[places.unsqueeze(1), top_ids]), dim=1).double()
    logprobs = (values - peaks.double().unsqueeze(1) - totals.unsqueeze(1)).float().double()
    return torch.cat((logprobs[:, :1], ahead.unsqueeze(1) + 1.0, top_ids.double(), logprobs[:, 1:]), dim=1)


def tokens_of(
    lines: Sequence[Sequence[float]], token_ids: Sequence[int], wanted: Sequence[int | None]
) -> Iterator[TokenLogprobs]:
    """Yield the results of `described` from its lines. wanted[i]: as in `octavo.sampling.logprobs.token_logprobs`."""
    for line, token_id, count in zip(lines, token_ids, wanted, strict=True):
        if count is None:
            yield TokenLogprobs(token_id=token_id, logprob=line[0])
            continue
        top = line[2:]
        num_top = len(top) // 2
        yield TokenLogprobs(
            token_id=token_id,
            logprob=line[0],
            rank=int(line[1]),
            top_ids=tuple(int(each) for each in top[: min(count, num_top)]),
            top_logprobs=tuple(top[num_top : num_top + count]),
        )
