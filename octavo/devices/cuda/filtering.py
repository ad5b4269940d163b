"""Launches the kernels that find the tokens that min-p, top-k and top-p keep."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from octavo.devices.cuda.runtime import Launcher

BLOCK: Final = 1024
"""Columns of a program."""
GROUP: Final = 64
"""Columns of a group, whose nearest token bounds top-k; if k exceeds the number of groups all tokens are listed."""
SEARCHED: Final = {"BLOCK": 1024, "num_warps": 16}
"""Constants of the single program of a row, which compares `BLOCK` entries at a time with 16 limits."""
REFINED: Final = {"BLOCK": 4096, "CHUNK": 256}
"""Entries of a long list for each program, and how many of them it compares at a time."""
STEPS: Final = 3
"""Steps of the search in a long list; each chooses one of 16 sections."""
STATE: Final = 64
"""Numbers in a line of the kernels' `state`."""


def find_distances(logits: Tensor, largest: Tensor, asked: Tensor, launch: Launcher, *, may_be_long: bool) -> None:
    """Write the distance up to which tokens are kept to the lines of `asked` (`kernels/sampling.py`).

    logits: float32 [all rows, vocab]. largest: float32 [all rows]. may_be_long: a row has top-p without top-k.
    """
    device, num_rows, num_columns = logits.device, len(asked), logits.shape[1]
    num_blocks = -(-num_columns // BLOCK)
    num_groups = num_blocks * (BLOCK // GROUP)

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    nearest, masses = empty(torch.int32, num_rows, num_groups), empty(torch.int64, num_rows, num_blocks)
    each_block, each_row = (num_rows, num_blocks), (num_rows,)
    source, shape = (logits, largest, asked), (num_columns, logits.stride(0))
    launch("filters.survey", each_block, *source, nearest, masses, *shape, BLOCK=BLOCK, GROUP=GROUP)
    limits, totals = empty(torch.int32, num_rows), empty(torch.int64, num_rows)
    sizes = num_groups, num_blocks, num_columns
    launch("filters.bound", each_row, asked, nearest, masses, limits, totals, *sizes, **SEARCHED)
    state = torch.zeros((num_rows, STATE), dtype=torch.int64, device=device)
    lists = [empty(dtype, 2, num_rows, num_columns) for dtype in (torch.int32, torch.float32)]
    launch("filters.collect", each_block, *source, limits, state, *lists, *shape, BLOCK=BLOCK)
    found = asked, limits, totals, state, *lists, num_columns
    if may_be_long:
        each_part = num_rows, -(-num_columns // REFINED["BLOCK"])
        for step in range(STEPS):
            launch("filters.refine", each_part, *found, STEP=step, **REFINED)
        launch("filters.narrow", each_block, *found, BLOCK=BLOCK)
    launch("filters.settle", each_row, *found, **SEARCHED)
