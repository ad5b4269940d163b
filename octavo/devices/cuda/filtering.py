"""Launches the kernels that draw from what min-p, top-k and top-p keep."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.devices.cuda.launch import Launcher
from octavo.devices.reference.sampler import keys_of
from octavo.sampling.metadata import SamplingRow

BLOCK: Final = 1024
"""Columns of a program."""
LISTED: Final = 256
"""Entries of a list that are looked at together, with 16 limits."""
GROUP: Final = 64
"""Columns whose nearest token bounds top-k: the filter looks at all tokens where k exceeds the number of groups."""

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


def draw_filtered(
    logits: Tensor,
    draws: Draws,
    places: Sequence[int],
    rows: Sequence[SamplingRow],
    sent: Callable[[NDArray[Any]], Tensor],
    launch: Launcher,
) -> None:
    """Draw for `rows` from what their filters keep, as `octavo.devices.cuda.draws.draw_plainly`; 0 where nothing is a
    number. logits: float32 [all rows, vocab]."""
    device, (num_rows, num_columns) = logits.device, (len(rows), logits.shape[1])
    asked = sent(np.array([asked_of(*each) for each in zip(places, rows, strict=True)], dtype=np.float64))
    num_blocks = -(-num_columns // BLOCK)
    num_groups = num_blocks * (BLOCK // GROUP)

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    nearest, masses = empty(torch.int32, num_rows, num_groups), empty(torch.int64, num_rows, num_blocks)
    each_block, each_row = (num_rows, num_blocks), (num_rows,)
    source = logits, draws.largest, asked
    shape = num_columns, logits.stride(0)
    launch("filters.survey", each_block, *source, nearest, masses, *shape, BLOCK=BLOCK, GROUP=GROUP)
    limits, totals = empty(torch.int32, num_rows), empty(torch.int64, num_rows)
    sizes = num_groups, num_blocks, num_columns
    launch("filters.bound", each_row, asked, nearest, masses, limits, totals, *sizes, BLOCK=LISTED)
    counts = torch.zeros(num_rows, dtype=torch.int32, device=device)
    found = [empty(dtype, num_rows, num_columns) for dtype in (torch.int32, torch.int32, torch.float32)]
    launch("filters.collect", each_block, *source, limits, counts, *found, *shape, BLOCK=BLOCK)
    targets = draws.token_ids, draws.told
    launch("filters.draw", each_row, asked, totals, counts, *found, *targets, num_columns, BLOCK=LISTED)


def asked_of(place: int, row: SamplingRow) -> tuple[float, ...]:
    """Return the line of a row in `asked` of the kernels."""
    params = row.sequence.params
    (keys,) = keys_of(row)
    distance = _FARTHEST
    if params.min_p > 0.0:
        (distance,) = struct.unpack("<i", struct.pack("<f", abs(math.log(params.min_p))))
    return place, params.temperature, distance, min(max(params.top_k, 0), _MOST), params.top_p, *keys
