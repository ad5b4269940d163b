"""The likeliest token of a row, and the exponential race of `octavo.sampling.random`, in Triton.

Each is two kernels: one over blocks of columns, one that puts the blocks of a row together. `asked` has a line of eight
float64 for each row: its place among those of the logits, temperature (less than 0 where the likeliest token is taken),
the distance up to which tokens may be drawn (as an integer; the largest finite one for all), top-k (0 for none), top-p,
the two keys of the draw, and a number that kernels do not read. A token's distance is how far its scaled logit
(`octavo.sampling.filters.scale`) lies below the largest one: it is not negative, so that its bits, taken as an integer,
have its order. `told` has a line of two float64 for each row, which go to the host: the largest logit and the token.
"""

from __future__ import annotations

import triton
import triton.language as tl

ASKED = tl.constexpr(8)
"""Numbers in a line of `asked`."""
LEAST = tl.constexpr(-(1 << 63))
"""The key of a column behind the last one."""
_NAN = tl.constexpr(0x7FFFFFFF)
"""As the bits of a float32, and more than those of infinity."""
_ROUGHLY = tl.constexpr(1.0 - 1e-4)
"""Rough scores are nearer to the exact ones, as shares."""
_NO_WINNER = tl.constexpr(0.05)
"""Less than the likeliest token's score, whose arrival is 16.7 at most."""


@triton.jit
def _mix(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def arrivals(tokens, key_1, key_2):
    """Return when tokens of weight 1 arrive, float64, by the generator of `octavo.sampling.random`."""
    hashed = _mix(_mix(tokens ^ key_1) + key_2)
    # rounded to float32 as the reference does; the rest in float64, because Triton's logarithms of float32 are coarse
    uniform = tl.minimum((hashed.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 2.0**-24)
    return -tl.log(1.0 - uniform.to(tl.float64))


@triton.jit
def peak_of(largest):
    """Return a row's largest logit; 0 for one that is not finite, of which no numbers that are none are then made."""
    value = tl.load(largest)
    return tl.where(tl.abs(value) < float("inf"), value, 0.0)


@triton.jit
def distances_of(logits, largest, temperature):
    """Return the distances as integers; those of logits that are no numbers are beyond the largest finite one."""
    scaled = tl.div_rn(logits - largest, temperature)
    return tl.abs(scaled).to(tl.int32, bitcast=True)


@triton.jit
def weights_of(distances):
    """Return float32 weights, 1 for the likeliest token: rounded once, where the exponential of float32 is coarse."""
    return tl.exp(-distances.to(tl.float32, bitcast=True).to(tl.float64)).to(tl.float32)


@triton.jit
def ordered(values):
    """Return the bits of float32 as integers in the order of the values; 0.0 and -0.0 are equal."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def peaks(logits, keys, num_columns, row_stride, BLOCK: tl.constexpr):
    """Write the largest key of a block of columns, int64 [rows, blocks]: `ordered` times 2^32, less the column.

    NaN is larger than all numbers, as it is for torch.
    """
    row, block = tl.program_id(0), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    here = columns < num_columns
    values = tl.load(logits + row.to(tl.int64) * row_stride + columns, mask=here, other=0.0).to(tl.float32)
    found = tl.where(values == values, ordered(values), _NAN).to(tl.int64)
    best = tl.max(tl.where(here, (found << 32) - columns, LEAST), 0)
    tl.store(keys + row * tl.num_programs(1) + block, best)


@triton.jit(do_not_specialize=["num_blocks"])
def likeliest(keys, largest, token_ids, told, num_blocks, BLOCK: tl.constexpr):
    """Write a row's largest logit, float32 [rows], and its first column, int64 [rows], and tell both."""
    row = tl.program_id(0)
    best = tl.full([], LEAST, dtype=tl.int64)
    for start in range(0, num_blocks, BLOCK):
        blocks = start + tl.arange(0, BLOCK)
        found = tl.load(keys + row * num_blocks + blocks, mask=blocks < num_blocks, other=LEAST)
        best = tl.maximum(best, tl.max(found, 0))
    column = -best & 0xFFFFFFFF
    bits = ((best + column) >> 32).to(tl.int32)
    value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    tl.store(largest + row, value)
    tl.store(token_ids + row, column)
    tl.store(told + 2 * row, value.to(tl.float64))
    tl.store(told + 2 * row + 1, column.to(tl.float64))


@triton.jit
def _rough_arrivals(tokens, key_1, key_2):
    """Return `arrivals` as float32, of which some 10^-6 may be wrong."""
    hashed = _mix(_mix(tokens ^ key_1) + key_2)
    uniform = tl.minimum((hashed.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 2.0**-24)
    # near 1 the logarithm is nothing but the rounding of its argument
    series = uniform * (1 + uniform * (1 / 2 + uniform * (1 / 3 + uniform * (1 / 4 + uniform * (1 / 5)))))
    return tl.where(uniform < 0.0625, series, -tl.log(1.0 - uniform))


@triton.jit
def race_of_logits(logits, largest, asked, scores, places, num_columns, row_stride, BLOCK: tl.constexpr):
    """Write the best score of a block of columns for a row of `asked`, float64 [drawn rows, blocks], -1 for none that
    can win the row, and its column, int32; of equal scores the first column's.

    A score is the weight over the arrival. All are computed in float32, and in float64 those that may be the best.
    """
    row, block = tl.program_id(0), tl.program_id(1)
    line = asked + row * ASKED
    place = tl.load(line).to(tl.int64)
    temperature = tl.load(line + 1).to(tl.float32)
    if temperature < 0.0:
        return
    key_1 = tl.load(line + 5).to(tl.int64).to(tl.uint32)
    key_2 = tl.load(line + 6).to(tl.int64).to(tl.uint32)
    peak = peak_of(largest + place)
    logits += place * row_stride
    columns = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + columns, mask=columns < num_columns, other=-float("inf")).to(tl.float32)
    distances = distances_of(values, peak, temperature)
    may_be_drawn = (columns < num_columns) & (distances <= tl.load(line + 2).to(tl.int32))
    weights = tl.exp(-distances.to(tl.float32, bitcast=True))
    rough = tl.where(may_be_drawn, weights / _rough_arrivals(columns.to(tl.uint32), key_1, key_2), 0.0)
    may_win = rough >= tl.maximum(tl.max(rough, 0) * _ROUGHLY, _NO_WINNER)
    best = tl.full([], -1.0, dtype=tl.float64)
    winner = block * BLOCK
    column = tl.min(tl.where(may_win, columns, num_columns), 0)
    while column < num_columns:
        distance = distances_of(tl.load(logits + column).to(tl.float32), peak, temperature)
        score = weights_of(distance).to(tl.float64) / arrivals(column.to(tl.uint32), key_1, key_2)
        winner = tl.where(score > best, column, winner)
        best = tl.maximum(score, best)
        column = tl.min(tl.where(may_win & (columns > column), columns, num_columns), 0)
    target = row * tl.num_programs(1) + block
    tl.store(scores + target, best)
    tl.store(places + target, winner)


@triton.jit(do_not_specialize=["num_blocks"])
def winners(scores, places, asked, token_ids, told, num_blocks, BLOCK: tl.constexpr):
    """Write the column of the best score of a row of `asked` to the row's place in token_ids, and tell it."""
    row = tl.program_id(0)
    if tl.load(asked + row * ASKED + 1) < 0.0:
        return
    best = tl.full([], -2.0, dtype=tl.float64)
    winner = tl.zeros([], dtype=tl.int32)
    for start in range(0, num_blocks, BLOCK):
        blocks = start + tl.arange(0, BLOCK)
        here = blocks < num_blocks
        found = tl.load(scores + row * num_blocks + blocks, mask=here, other=-2.0)
        columns = tl.load(places + row * num_blocks + blocks, mask=here, other=0)
        score = tl.max(found, 0)
        column = tl.min(tl.where(here & (found == score), columns, 0x7FFFFFFF), 0)
        winner = tl.where(score > best, column, winner)
        best = tl.maximum(score, best)
    place = tl.load(asked + row * ASKED).to(tl.int64)
    tl.store(token_ids + place, winner.to(tl.int64))
    tl.store(told + 2 * place + 1, winner.to(tl.float64))
