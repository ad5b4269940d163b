"""How far from the likeliest token min-p, top-k and top-p keep tokens, found without a sort, in Triton.

Whatever is added up is an integer, masses too: no order of programs or of lists changes a bit, and a row's results
depend on that row alone. `asked` is that of `kernels/sampling.py`, with the distance of min-p.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.devices.cuda.kernels.sampling import ASKED, distances_of, peak_of, weights_of

_FARTHEST = tl.constexpr(0x7F7FFFFF)
"""The largest finite distance: that of a barred token is farther."""
_ONE = tl.constexpr(float(1 << 42))
"""The mass of the likeliest token. The masses of two million tokens together are an int64."""
_DIGITS = tl.constexpr(16)
"""Distances that are looked at together."""
STEPS = tl.constexpr(3)
"""Of `refine`."""
STATE = tl.constexpr(16 * (1 + 3))
"""Numbers in a line of `state`."""
LONG = tl.constexpr(4096)
"""Entries of a list up to which one program searches it."""


@triton.jit
def masses_of(weights):
    return (weights.to(tl.float64) * _ONE + 0.5).to(tl.int64)


@triton.jit
def _up_to(distances, weights, first, num, limits, BLOCK: tl.constexpr, OF_MASS: tl.constexpr):
    """Return how many of a list's distances, or with OF_MASS how much mass, lie up to each limit, int64 [limits]: of
    entries from `first` to `num`."""
    found = tl.zeros((_DIGITS, BLOCK), dtype=tl.int64)
    for start in range(first, num, BLOCK):
        places = start + tl.arange(0, BLOCK)
        here = places < num
        near = tl.load(distances + places, mask=here, other=0).to(tl.int64)
        is_near = here[None, :] & (near[None, :] <= limits[:, None])
        if OF_MASS:
            masses = masses_of(tl.load(weights + places, mask=here, other=0.0))
            found += tl.where(is_near, masses[None, :], 0)
        else:
            found += is_near.to(tl.int64)
    return tl.sum(found, 1)


@triton.jit
def _reach(distances, weights, num, base, wanted, BLOCK: tl.constexpr, OF_MASS: tl.constexpr):
    """Return the smallest distance up to which there are as many, or as much, as wanted; the largest int32 for none.

    base: how many, or how much, is nearer than the list.
    """
    digits = tl.arange(0, _DIGITS).to(tl.int64)
    found = tl.zeros([], dtype=tl.int64)
    for step in range(8):
        shift = 28 - 4 * step
        have = base + _up_to(distances, weights, 0, num, found + ((digits + 1) << shift) - 1, BLOCK, OF_MASS)
        if OF_MASS:
            is_short = have.to(tl.float64) < wanted
        else:
            is_short = have < wanted
        found += tl.minimum(tl.sum(is_short.to(tl.int64), 0), _DIGITS - 1) << shift
    return tl.minimum(found, 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _as_far_as(weight):
    """Return the largest distance of tokens of at least this weight."""
    digits = tl.arange(0, _DIGITS).to(tl.int64)
    found = tl.zeros([], dtype=tl.int64)
    for step in range(8):
        each = found + (digits << (28 - 4 * step))
        has_weight = (each <= _FARTHEST) & (weights_of(tl.minimum(each, _FARTHEST).to(tl.int32)) >= weight)
        found = tl.max(tl.where(has_weight, each, found), 0)
    return found.to(tl.int32)


@triton.jit
def _wanted(asked, totals, line, row):
    """Return the mass that top-p wants: a share of all mass, or of that which min-p has left."""
    of_all = tl.load(asked + row * ASKED + 2).to(tl.int32) == _FARTHEST
    total = tl.load(tl.where(of_all, totals + row, line + 1))
    return tl.load(asked + row * ASKED + 4) * total.to(tl.float64)


@triton.jit
def _is_long(asked, line, row):
    """Return whether a row's list is one of which top-p takes a part, after no top-k, and long."""
    has_top_k = tl.load(asked + row * ASKED + 3) > 0
    return (tl.load(line) > LONG) & (tl.load(asked + row * ASKED + 4) < 1.0) & (not has_top_k)


@triton.jit
def _sections(low, high):
    """Return the ends of equal parts of what lies beyond one distance and up to another, int32 [16].

    All operations are exact but the last: each program has the same ends.
    """
    near = tl.maximum(low, 0).to(tl.float32, bitcast=True).to(tl.float64)
    far = high.to(tl.float32, bitcast=True).to(tl.float64)
    shares = (tl.arange(0, _DIGITS) + 1).to(tl.float64) * (1.0 / _DIGITS)
    return (near + (far - near) * shares).to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def _bracket(line, limit, wanted, STEPS: tl.constexpr):
    """Return between which distances as much mass as wanted is reached, beyond the first and up to the second, and how
    much lies up to the first: by what so many steps of `refine` have found."""
    digits = tl.arange(0, _DIGITS)
    low = tl.full([], -1, dtype=tl.int32)
    high = limit
    base = tl.zeros([], dtype=tl.int64)
    for step in tl.static_range(STEPS):
        ends = _sections(low, high)
        have = tl.load(line + _DIGITS * (step + 1) + digits)
        is_short = have.to(tl.float64) < wanted
        base = tl.maximum(base, tl.max(tl.where(is_short, have, 0), 0))
        low = tl.maximum(low, tl.max(tl.where(is_short, ends, -1), 0))
        high = tl.minimum(high, tl.min(tl.where(is_short, high, ends), 0))
    return low, high, base


@triton.jit
def survey(
    logits, largest, asked, nearest, masses, num_columns, row_stride,
    BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Write the smallest distance of each group of a block of columns, and where no top-k comes first the block's mass.

    nearest: int32 [rows, blocks · BLOCK / GROUP]. masses: int64 [rows, blocks].
    """
    row, block = tl.program_id(0), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    line = asked + row * ASKED
    place = tl.load(line).to(tl.int64)
    values = tl.load(logits + place * row_stride + columns, mask=columns < num_columns, other=-float("inf"))
    temperature = tl.load(line + 1).to(tl.float32)
    distances = distances_of(values, peak_of(largest + place), temperature)
    program = row * tl.num_programs(1) + block
    if tl.load(line + 3) == 0:
        weights = tl.where(distances <= _FARTHEST, weights_of(distances), 0.0)
        tl.store(masses + program, tl.sum(masses_of(weights), 0))
    groups: tl.constexpr = BLOCK // GROUP
    closest = tl.min(tl.reshape(distances, (groups, GROUP)), 1)
    tl.store(nearest + program * groups + tl.arange(0, groups), closest)


@triton.jit(do_not_specialize=["num_groups", "num_blocks"])
def bound(asked, nearest, masses, limits, totals, num_groups, num_blocks, num_columns, BLOCK: tl.constexpr):
    """Write a distance, int32 [rows], beyond which no filter keeps a token, and int64 [rows] the row's mass, where
    no top-k comes first."""
    row = tl.program_id(0)
    limit = tl.load(asked + row * ASKED + 2).to(tl.int32)
    top_k = tl.load(asked + row * ASKED + 3).to(tl.int64)
    top_p = tl.load(asked + row * ASKED + 4)
    if top_k > 0:
        if top_k <= num_groups:
            # so many groups have a token as near as that, so there are as many tokens or more
            limit = tl.minimum(limit, _reach(nearest + row * num_groups, masses, num_groups, 0, top_k, BLOCK, False))
    else:
        total = tl.zeros([], dtype=tl.int64)
        for start in range(0, num_blocks, BLOCK):
            blocks = start + tl.arange(0, BLOCK)
            total += tl.sum(tl.load(masses + row * num_blocks + blocks, mask=blocks < num_blocks, other=0), 0)
        tl.store(totals + row, total)
        if (top_p < 1.0) & (limit == _FARTHEST):
            # all tokens of less than (1 - top_p) / columns weigh less than 1 - top_p together (half of it, to be clear
            # of rounding)
            least = (total.to(tl.float64) / _ONE) * ((1.0 - top_p) / (2.0 * num_columns))
            limit = tl.minimum(limit, (-tl.log(tl.maximum(least, 1e-30))).to(tl.float32).to(tl.int32, bitcast=True))
        if top_p >= 1.0:  # nothing need be found
            limit = -1
    tl.store(limits + row, limit)


@triton.jit
def collect(
    logits, largest, asked, limits, state, distances, weights, num_columns, row_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Append to a row's list what lies up to its limit in a block of columns, in any order.

    distances: int32, weights: float32 [2, rows, columns], of which the first are written. state: int64 [rows, STATE], 0
    before: entries of the list, their mass, entries of the second list, and from 16 on what `refine` finds.
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
        found_weights = weights_of(found)
        mass = tl.sum(masses_of(tl.where(is_near, found_weights, 0.0)), 0)
        tl.atomic_add(state + row * STATE + 1, mass, sem="relaxed")
        first = tl.atomic_add(state + row * STATE, num.to(tl.int64), sem="relaxed")
        targets = row.to(tl.int64) * num_columns + first + tl.cumsum(is_near.to(tl.int32), 0) - 1
        tl.store(distances + targets, found, mask=is_near)
        tl.store(weights + targets, found_weights, mask=is_near)


@triton.jit
def refine(
    asked, limits, totals, state, distances, weights, num_columns,
    STEP: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Add the mass that a block of a long list has up to each end of sections of the row's bracket."""
    row, block = tl.program_id(0), tl.program_id(1)
    line = state + row * STATE
    num = tl.load(line).to(tl.int32)
    first = block * BLOCK
    if _is_long(asked, line, row) & (first < num):
        low, high, _ = _bracket(line, tl.load(limits + row), _wanted(asked, totals, line, row), STEP)
        start = row.to(tl.int64) * num_columns
        ends = _sections(low, high).to(tl.int64)
        have = _up_to(distances + start, weights + start, first, tl.minimum(first + BLOCK, num), ends, CHUNK, True)
        tl.atomic_add(line + _DIGITS * (STEP + 1) + tl.arange(0, _DIGITS), have, sem="relaxed")


@triton.jit
def narrow(asked, limits, totals, state, distances, weights, num_columns, BLOCK: tl.constexpr):
    """Append to a row's second list what a block of a long one has in the bracket, in any order."""
    row, block = tl.program_id(0), tl.program_id(1)
    line = state + row * STATE
    num = tl.load(line).to(tl.int32)
    if _is_long(asked, line, row) & (block * BLOCK < num):
        low, high, _ = _bracket(line, tl.load(limits + row), _wanted(asked, totals, line, row), STEPS)
        start = row.to(tl.int64) * num_columns
        places = block * BLOCK + tl.arange(0, BLOCK)
        found = tl.load(distances + start + places, mask=places < num, other=-1)
        is_inside = (found > low) & (found <= high)
        num_inside = tl.sum(is_inside.to(tl.int32), 0)
        if num_inside > 0:
            after = tl.atomic_add(line + 2, num_inside.to(tl.int64), sem="relaxed")
            targets = tl.num_programs(0).to(tl.int64) * num_columns + start + after
            targets += tl.cumsum(is_inside.to(tl.int32), 0) - 1
            tl.store(distances + targets, found, mask=is_inside)
            tl.store(weights + targets, tl.load(weights + start + places, mask=is_inside), mask=is_inside)


@triton.jit
def settle(asked, limits, totals, state, distances, weights, num_columns, BLOCK: tl.constexpr):
    """Write to a row's line of `asked` up to which distance all its filters keep tokens."""
    row = tl.program_id(0)
    line = state + row * STATE
    start = row.to(tl.int64) * num_columns
    num = tl.load(line).to(tl.int32)
    top_k = tl.load(asked + row * ASKED + 3).to(tl.int64)
    top_p = tl.load(asked + row * ASKED + 4)
    last = tl.load(asked + row * ASKED + 2).to(tl.int32)
    wanted = _wanted(asked, totals, line, row)
    if top_k > 0:
        last = tl.minimum(last, _reach(distances + start, weights + start, num, 0, top_k, BLOCK, False))
        # the mass is counted of what the filters before it have left
        up_to_last = tl.full([_DIGITS], 1, dtype=tl.int64) * last
        total = tl.max(_up_to(distances + start, weights + start, 0, num, up_to_last, BLOCK, True), 0)
        wanted = top_p * total.to(tl.float64)
    if top_p < 1.0:
        base = tl.zeros([], dtype=tl.int64)
        if _is_long(asked, line, row):
            _, _, base = _bracket(line, tl.load(limits + row), wanted, STEPS)
            num = tl.load(line + 2).to(tl.int32)
            start += tl.num_programs(0).to(tl.int64) * num_columns
        reached = _reach(distances + start, weights + start, num, base, wanted, BLOCK, True)
        # tokens of the same weight as the last of them stay
        last = tl.minimum(last, _as_far_as(weights_of(tl.minimum(reached, _FARTHEST))))
    tl.debug_barrier()  # all threads have read the distance before one of them writes another
    tl.store(asked + row * ASKED + 2, last.to(tl.float64))
