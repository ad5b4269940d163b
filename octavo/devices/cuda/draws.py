"""Launches the kernels that find the likeliest tokens, and those that draw where logits alone decide."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.sampling_params import SamplingParams
from octavo.devices.cuda.filtering import find_distances
from octavo.devices.cuda.launch import Launcher
from octavo.devices.reference.sampler import keys_of
from octavo.sampling.metadata import SamplingRow

BLOCK: Final = 2048
"""Columns of a program."""
WARPS: Final = 8
"""Of a program of so many columns."""
BLOCKS: Final = 128
"""Blocks that are put together at a time."""

_FARTHEST: Final = 0x7F7FFFFF
_MOST: Final = 2**31 - 1


class Draws(NamedTuple):
    """What is drawn of rows of logits, on the device."""

    largest: Tensor
    """Logits, float32 [rows]; NaN where one is among them."""
    token_ids: Tensor
    """int64 [rows]."""
    told: Tensor
    """Both, float64 [rows, 2], for the host."""


def likeliest_tokens(logits: Tensor, launch: Launcher) -> Draws:
    """Return the first of the largest logits of each row of [rows, vocab], without waiting for the device."""
    (num_rows, num_columns), device = logits.shape, logits.device
    num_blocks = -(-num_columns // BLOCK)
    keys = torch.empty((num_rows, num_blocks), dtype=torch.int64, device=device)
    shape, options = (num_columns, logits.stride(0)), {"BLOCK": BLOCK, "num_warps": WARPS}
    launch("sampling.peaks", (num_rows, num_blocks), logits, keys, *shape, **options)
    draws = Draws(
        torch.empty(num_rows, dtype=torch.float32, device=device),
        torch.empty(num_rows, dtype=torch.int64, device=device),
        torch.empty((num_rows, 2), dtype=torch.float64, device=device),
    )
    launch("sampling.likeliest", (num_rows,), keys, *draws, num_blocks, BLOCK=BLOCKS)
    return draws


def draw(
    logits: Tensor,
    draws: Draws,
    places: Sequence[int],
    rows: Sequence[SamplingRow],
    sent: Callable[[NDArray[Any]], Tensor],
    launch: Launcher,
) -> None:
    """Draw for `rows`, which are those of the logits at `places`, what filters keep of them: their tokens take the
    place of those in `draws`. sent: copies an array to the device without waiting for it.

    logits: float32 [all rows, vocab].
    """
    num_columns, device = logits.shape[1], logits.device
    # those come first of which it must be found what their filters keep
    order = sorted(zip(places, rows, strict=True), key=lambda each: not _is_searched(each[1].sequence.params))
    asked = sent(np.array([_asked(*each) for each in order], dtype=np.float64))
    searched = [each for each in (row.sequence.params for row in rows) if _is_searched(each)]
    if searched:
        may_be_long = any(each.top_p < 1.0 and each.top_k <= 0 for each in searched)
        find_distances(logits, draws.largest, asked, len(searched), launch, may_be_long=may_be_long)
    blocks = len(rows), -(-num_columns // BLOCK)
    scores = torch.empty(blocks, dtype=torch.float64, device=device)
    columns = torch.empty(blocks, dtype=torch.int32, device=device)
    given = logits, draws.largest, asked, scores, columns, num_columns, logits.stride(0)
    launch("sampling.race_of_logits", blocks, *given, BLOCK=BLOCK, num_warps=WARPS)
    found = scores, columns, asked, draws.token_ids, draws.told
    launch("sampling.winners", blocks[:1], *found, blocks[1], BLOCK=BLOCKS)


def _is_searched(params: SamplingParams) -> bool:
    """Return whether a filter keeps tokens up to a distance that depends on logits; that of min-p does not."""
    return params.top_k > 0 or params.top_p < 1.0


def _asked(place: int, row: SamplingRow) -> tuple[float, ...]:
    """Return the line of a row in `asked` of the kernels."""
    params = row.sequence.params
    (keys,) = keys_of(row)
    distance = _FARTHEST
    if params.min_p > 0.0:
        (distance,) = struct.unpack("<i", struct.pack("<f", abs(math.log(params.min_p))))
    return place, params.temperature, distance, min(max(params.top_k, 0), _MOST), params.top_p, *keys
