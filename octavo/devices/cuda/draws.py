"""Launches the kernels that find the likeliest tokens, and those that draw from logits without the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.devices.cuda.filtering import find_distances
from octavo.devices.cuda.runtime import Launcher
from octavo.sampling.metadata import SampledSequence
from octavo.sampling.random import packed_draw_key
from octavo.sampling.sampler import DrawPlan

BLOCK: Final = 2048
"""Columns of a program."""
WARPS: Final = 8
"""Warps of a program of `BLOCK` columns."""
BLOCKS: Final = 128
"""Blocks of a row that are merged at a time."""

_FARTHEST: Final = 0x7F7FFFFF
_MOST: Final = 2**31 - 1


ASKED: Final = 8
"""Numbers of a row in the kernels' argument `asked`."""
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
    blocks = len(asked), -(-num_columns // BLOCK)
    scores = torch.empty(blocks, dtype=torch.float64, device=device)
    columns = torch.empty(blocks, dtype=torch.int32, device=device)
    given = logits, draws.largest, asked, scores, columns, num_columns, logits.stride(0)
    launch("sampling.race_of_logits", blocks, *given, BLOCK=BLOCK, num_warps=WARPS)
    found = scores, columns, asked, draws.token_ids, draws.told
    launch("sampling.winners", blocks[:1], *found, blocks[1], BLOCK=BLOCKS)
    return draws
