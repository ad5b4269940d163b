"""Launches the kernels that draw from logits without the host: they find the likeliest tokens, those that filters keep,
and the winners of races."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.devices.cuda.runtime import Launcher
from octavo.sampling.metadata import SampledSequence
from octavo.sampling.random import packed_draw_key
from octavo.sampling.sampler import DrawPlan

DRAWN_BLOCK: Final = 2048
"""Columns of a program that draws."""
WARPS: Final = 8
"""Warps of a program of `DRAWN_BLOCK` columns."""
BLOCKS: Final = 128
"""Blocks of a row that are merged at a time."""
BLOCK: Final = 1024
"""Columns of a program that searches, changes or describes logits."""
GROUP: Final = 64
"""Columns of a group, whose nearest token bounds top-k; if k exceeds the number of groups all tokens are listed."""
SEARCHED: Final = {"BLOCK": 1024, "num_warps": 16}
"""Constants of the one program that searches a row: it compares `BLOCK` entries at a time with 16 limits."""
REFINED: Final = {"BLOCK": 4096, "CHUNK": 256}
"""Entries of a long list for each program, and how many of them it compares at a time."""
STEPS: Final = 3
"""Steps of the search in a long list; each chooses one of 16 sections."""
STATE: Final = 64
"""Numbers in a line of the kernels' `state`."""

_FARTHEST: Final = 0x7F7FFFFF
_MOST: Final = 2**31 - 1


ASKED: Final = 8
"""Numbers per row in the kernels' argument `asked`."""
_NO_KEY: Final = bytes(8)


class Kind(IntEnum):
    """The kernels that a row needs. Those of a larger kind do nothing for rows of a smaller one."""

    LIKELIEST = 0
    PLAIN = 1
    """A race among all tokens, or those that min-p keeps, whose distance does not depend on logits."""
    SEARCHED = 2
    """As `PLAIN`, after a search for the distance up to which top-k or top-p keep tokens."""
    SEARCHED_LONG = 3
    """As `SEARCHED`, with top-p and without top-k, which may keep most of the tokens."""


class Line(NamedTuple):
    """The sampling parameters of a row for the kernels. numbers: temperature, distance, top-k and top-p."""

    kind: Kind
    numbers: tuple[float, ...]
    draw: tuple[int, int] | None = None
    """Seed and index of the sequence, for the keys of its draws; None for a greedy row."""


class Lines(NamedTuple):
    """The sampling parameters of the rows of a batch. asked: the kernels' argument, without the keys of draws."""

    kind: Kind
    asked: NDArray[np.float64]
    draws: Sequence[tuple[int, int] | None]


class Draws(NamedTuple):
    """The tokens drawn from rows of logits, on the device."""

    largest: Tensor
    """The largest logit of each row, float32 [rows]; NaN where the row has a NaN."""
    token_ids: Tensor
    """int64 [rows]."""
    told: Tensor
    """Largest logits and token ids, float64 [rows, 2], for the host."""


def likeliest_tokens(logits: Tensor, launch: Launcher) -> Draws:
    """Return the first of the largest logits of each row of [rows, vocab], without waiting for the device."""
    (num_rows, num_columns), device = logits.shape, logits.device
    num_blocks = -(-num_columns // DRAWN_BLOCK)
    keys = torch.empty((num_rows, num_blocks), dtype=torch.int64, device=device)
    given = logits, keys, num_columns, logits.stride(0)
    launch("sampling.peaks", (num_rows, num_blocks), *given, BLOCK=DRAWN_BLOCK, num_warps=WARPS)
    draws = Draws(
        torch.empty(num_rows, dtype=torch.float32, device=device),
        torch.empty(num_rows, dtype=torch.int64, device=device),
        torch.empty((num_rows, 2), dtype=torch.float64, device=device),
    )
    launch("sampling.likeliest", (num_rows,), keys, *draws, num_blocks, BLOCK=BLOCKS)
    return draws


def lines_of(lines: Sequence[Line]) -> Lines:
    """Return the parameters of the rows of a batch."""
    asked = np.zeros((len(lines), ASKED))
    asked[:, 0] = np.arange(len(lines))
    asked[:, 1:5] = [line.numbers for line in lines]
    return Lines(max(line.kind for line in lines), asked, [line.draw for line in lines])


def plan_of(lines: Lines, positions: Sequence[int]) -> DrawPlan:
    """Return the plan of a step. positions: the place of each row's drawn token in its sequence."""
    asked = lines.asked.copy()
    if lines.kind is not Kind.LIKELIEST:
        keys = b"".join(
            [
                _NO_KEY if draw is None else packed_draw_key(*draw, position)
                for draw, position in zip(lines.draws, positions, strict=True)
            ]
        )
        asked[:, 5:7] = np.frombuffer(keys, dtype="<u4").reshape(-1, 2)
    return DrawPlan(lines.kind, asked)


def line_of(sequence: SampledSequence) -> Line:
    """Return the numbers of a sequence's rows in the kernels' argument `asked`, the same in each step."""
    params = sequence.params
    if params.is_greedy:
        return Line(Kind.LIKELIEST, (-1.0, _FARTHEST, 0, 1.0))
    distance = _FARTHEST
    if params.min_p > 0.0:
        distance = int(np.float32(abs(math.log(params.min_p))).view(np.int32))
    top_k, kind = min(max(params.top_k, 0), _MOST), Kind.PLAIN
    if top_k or params.top_p < 1.0:
        kind = Kind.SEARCHED if top_k else Kind.SEARCHED_LONG
    draw = params.seed or 0, sequence.index
    return Line(kind, (params.temperature, distance, top_k, params.top_p), draw)


def drawn(logits: Tensor, kind: int, asked: Tensor, launch: Launcher) -> Draws:
    """Return the tokens of all rows of `logits` [rows, vocab], without waiting for the device; `asked` is changed."""
    draws = likeliest_tokens(logits, launch)
    if kind == Kind.LIKELIEST:
        return draws
    num_columns, device = logits.shape[1], logits.device
    if kind >= Kind.SEARCHED:
        find_distances(logits, draws.largest, asked, launch, may_be_long=kind == Kind.SEARCHED_LONG)
    blocks = len(asked), -(-num_columns // DRAWN_BLOCK)
    scores = torch.empty(blocks, dtype=torch.float64, device=device)
    columns = torch.empty(blocks, dtype=torch.int32, device=device)
    given = logits, draws.largest, asked, scores, columns, num_columns, logits.stride(0)
    launch("sampling.race_of_logits", blocks, *given, BLOCK=DRAWN_BLOCK, num_warps=WARPS)
    found = scores, columns, asked, draws.token_ids, draws.told
    launch("sampling.winners", blocks[:1], *found, blocks[1], BLOCK=BLOCKS)
    return draws


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
