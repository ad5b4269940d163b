"""Launches the kernels that find the likeliest tokens, and those that draw where logits alone decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.devices.cuda.filtering import Draws, asked_of
from octavo.devices.cuda.launch import Launcher
from octavo.sampling.metadata import SamplingRow

BLOCK: Final = 2048
"""Columns of a program."""
WARPS: Final = 8
"""Of a program of so many columns."""
BLOCKS: Final = 128
"""Blocks that are put together at a time."""


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


def draw_plainly(
    logits: Tensor,
    draws: Draws,
    places: Sequence[int],
    rows: Sequence[SamplingRow],
    sent: Callable[[NDArray[Any]], Tensor],
    launch: Launcher,
) -> None:
    """Draw by temperature alone for `rows`, which are those of the logits at `places`: their tokens take the place of
    those in `draws`. sent: copies an array to the device without waiting for it."""
    num_columns, device = logits.shape[1], logits.device
    asked = sent(np.array([asked_of(*each) for each in zip(places, rows, strict=True)], dtype=np.float64))
    blocks = len(rows), -(-num_columns // BLOCK)
    scores = torch.empty(blocks, dtype=torch.float64, device=device)
    columns = torch.empty(blocks, dtype=torch.int32, device=device)
    given = logits, draws.largest, asked, scores, columns, num_columns, logits.stride(0)
    launch("sampling.race_of_logits", blocks, *given, BLOCK=BLOCK, num_warps=WARPS)
    found = scores, columns, asked, draws.token_ids, draws.told
    launch("sampling.winners", blocks[:1], *found, blocks[1], BLOCK=BLOCKS)
