"""Draws from what min-p, top-k and top-p keep, without a sort, in Triton.

Whatever is added up is an integer, masses too: no
order of programs or of lists changes a bit, and a row's results depend on that row alone. `asked` is that of
`kernels/sampling.py`, with the distance of min-p.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.devices.cuda.kernels.sampling import ASKED, arrivals, distances_of, peak_of, weights_of

_FARTHEST = tl.constexpr(0x7F7FFFFF)
"""The largest finite distance: that of a barred token is farther."""
_ONE = tl.constexpr(float(1 << 42))
"""The mass of the likeliest token. The masses of two million tokens together are an int64."""


@triton.jit
def _masses(weights):
    return (weights.to(tl.float64) * _ONE + 0.5).to(tl.int64)


@triton.jit
def _up_to(distances, weights, num, limits, BLOCK: tl.constexpr, OF_MASS: tl.constexpr):
    """Return how many of a list's distances, or with OF_MASS how much mass, lie up to each limit, int64 [limits]."""
    totals = tl.zeros_like(limits)
    for start in range(0, num, BLOCK):
        places = start + tl.arange(0, BLOCK)
        here = places < num
        found = tl.load(distances + places, mask=here, other=0).to(tl.int64)
        is_near = here[None, :] & (found[None, :] <= limits[:, None])
        if OF_MASS:
            masses = _masses(tl.load(weights + places, mask=here, other=0.0))
            totals += tl.sum(tl.where(is_near, masses[None, :], 0), 1)
        else:
            totals += tl.sum(is_near.to(tl.int32), 1)
    return totals


@triton.jit
def _reach(distances, weights, num, wanted, BLOCK: tl.constexpr, OF_MASS: tl.constexpr):
    """Return the smallest distance up to which there are as many, or as much, as wanted; the largest int32 for none."""
    digits = tl.arange(0, 16).to(tl.int64)
    found = tl.zeros([], dtype=tl.int64)
    for step in range(8):
        shift = 28 - 4 * step
        have = _up_to(distances, weights, num, found + ((digits + 1) << shift) - 1, BLOCK, OF_MASS)
        if OF_MASS:
            is_short = have.to(tl.float64) < wanted
        else:
            is_short = have < wanted
        found += tl.minimum(tl.sum(is_short.to(tl.int64), 0), 15) << shift
    return tl.minimum(found, 0x7FFFFFFF).to(tl.int32)


@triton.jit
def survey(
    logits, largest, asked, nearest, masses, num_columns, row_stride,
    BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Write the smallest distance of each group of a block of columns, and the mass of the block.

    nearest: int32 [rows, blocks · BLOCK / GROUP]. masses: int64 [rows, blocks].
    """
    row, block = tl.program_id(0), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    line = asked + row * ASKED
    place = tl.load(line).to(tl.int64)
    values = tl.load(logits + place * row_stride + columns, mask=columns < num_columns, other=-float("inf"))
    temperature = tl.load(line + 1).to(tl.float32)
    distances = distances_of(values, peak_of(largest + place), temperature)
    weights = tl.where(distances <= _FARTHEST, weights_of(distances), 0.0)
    program = row * tl.num_programs(1) + block
    tl.store(masses + program, tl.sum(_masses(weights), 0))
    groups: tl.constexpr = BLOCK // GROUP
    closest = tl.min(tl.reshape(distances, (groups, GROUP)), 1)
    tl.store(nearest + program * groups + tl.arange(0, groups), closest)


@triton.jit
def bound(
    asked, nearest, masses, limits, totals, num_groups, num_blocks, num_columns,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a distance, int32 [rows], beyond which no filter keeps a token, and the row's mass, int64 [rows]."""
    row = tl.program_id(0)
    total = tl.zeros([], dtype=tl.int64)
    for start in range(0, num_blocks, BLOCK):
        blocks = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(masses + row * num_blocks + blocks, mask=blocks < num_blocks, other=0), 0)
    tl.store(totals + row, total)
    limit = tl.load(asked + row * ASKED + 2).to(tl.int32)
    top_k = tl.load(asked + row * ASKED + 3).to(tl.int64)
    top_p = tl.load(asked + row * ASKED + 4)
    if top_k > 0:
        if top_k <= num_groups:
            # so many groups have a token as near as that, so there are as many tokens or more
            limit = tl.minimum(limit, _reach(nearest + row * num_groups, masses, num_groups, top_k, BLOCK, False))
    else:
        if (top_p < 1.0) & (limit == _FARTHEST):
            # all tokens of less than (1 - top_p) / columns weigh less than 1 - top_p together (half of it, to be clear
            # of rounding)
            least = (total.to(tl.float64) / _ONE) * ((1.0 - top_p) / (2.0 * num_columns))
            limit = tl.minimum(limit, (-tl.log(tl.maximum(least, 1e-30))).to(tl.float32).to(tl.int32, bitcast=True))
    tl.store(limits + row, limit)


@triton.jit
def collect(
    logits, largest, asked, limits, counts, ids, distances, weights, num_columns, row_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Append to a row's list the tokens of a block of columns up to its limit, in any order.

    ids, distances: int32, weights: float32 [rows, columns]. counts: int32 [rows], 0 before.
    """
    row, block = tl.program_id(0), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    line = asked + row * ASKED
    place = tl.load(line).to(tl.int64)
    values = tl.load(logits + place * row_stride + columns, mask=columns < num_columns, other=-float("inf"))
    temperature = tl.load(line + 1).to(tl.float32)
    found = distances_of(values, peak_of(largest + place), temperature)
    is_near = found <= tl.load(limits + row)
    num = tl.sum(is_near.to(tl.int32), 0)
    if num > 0:
        first = tl.atomic_add(counts + row, num)
        targets = row.to(tl.int64) * num_columns + first + tl.cumsum(is_near.to(tl.int32), 0) - 1
        tl.store(ids + targets, columns, mask=is_near)
        tl.store(distances + targets, found, mask=is_near)
        tl.store(weights + targets, weights_of(found), mask=is_near)


@triton.jit
def draw(asked, totals, counts, ids, distances, weights, token_ids, told, num_columns, BLOCK: tl.constexpr):
    """Write the token that wins the race among what the filters keep of a row's list as `sampling.winners` does; 0 for
    none."""
    row = tl.program_id(0)
    start_of_row = row.to(tl.int64) * num_columns
    ids += start_of_row
    distances += start_of_row
    weights += start_of_row
    num = tl.load(counts + row)
    asked += row * ASKED
    place = tl.load(asked).to(tl.int64)
    top_k = tl.load(asked + 3).to(tl.int64)
    top_p = tl.load(asked + 4)
    min_p = tl.load(asked + 2).to(tl.int32)
    key_1 = tl.load(asked + 5).to(tl.int64).to(tl.uint32)
    key_2 = tl.load(asked + 6).to(tl.int64).to(tl.uint32)
    last = min_p
    if top_k > 0:
        last = tl.minimum(last, _reach(distances, weights, num, top_k, BLOCK, False))
    least = 0.0
    if top_p < 1.0:
        total = tl.load(totals + row)
        if (top_k > 0) | (min_p < _FARTHEST):
            # the mass is counted of what the filters before it have left
            up_to_last = tl.full([16], 1, dtype=tl.int64) * last
            total = tl.max(_up_to(distances, weights, num, up_to_last, BLOCK, True), 0)
        # tokens of the same weight as the last of them stay
        least = weights_of(_reach(distances, weights, num, top_p * total.to(tl.float64), BLOCK, True))
    best = tl.full([], -1.0, dtype=tl.float64)
    winner = tl.zeros([], dtype=tl.int32)
    for start in range(0, num, BLOCK):
        places = start + tl.arange(0, BLOCK)
        here = places < num
        tokens = tl.load(ids + places, mask=here, other=0)
        weight = tl.load(weights + places, mask=here, other=0.0)
        is_kept = here & (tl.load(distances + places, mask=here, other=0) <= last) & (weight >= least)
        scores = weight.to(tl.float64) / arrivals(tokens.to(tl.uint32), key_1, key_2)
        scores = tl.where(is_kept, scores, -1.0)
        score = tl.max(scores, 0)
        # of equal scores the smallest id wins
        token = tl.min(tl.where(scores == score, tokens, 0x7FFFFFFF), 0)
        winner = tl.where(score > best, token, tl.where(score == best, tl.minimum(token, winner), winner))
        best = tl.maximum(score, best)
    tl.store(token_ids + place, winner.to(tl.int64))
    tl.store(told + 2 * place + 1, winner.to(tl.float64))
