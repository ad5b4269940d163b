"""The exponential race of `octavo.sampling.random`, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


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
def race(
    weights, ids, keys_of_draws, owners, scores, places, num_columns, row_stride,
    BLOCK: tl.constexpr, HAS_IDS: tl.constexpr,
):  # fmt: skip
    """Write the best score of a block of columns for one draw, float64 [draws, blocks], and its column, int32.

    weights: float32 [rows, columns], of which a draw has row `owners[draw]`. ids: int64 of the same shape with HAS_IDS,
    the tokens of the columns; else a column is a token. keys_of_draws: int32 [draws, 2]. Of equal scores the first
    column wins.
    """
    draw, block = tl.program_id(0), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    here = columns < num_columns
    row = tl.load(owners + draw).to(tl.int64) * row_stride
    weight = tl.load(weights + row + columns, mask=here, other=0.0)
    token = columns.to(tl.uint32)
    if HAS_IDS:
        token = tl.load(ids + row + columns, mask=here, other=0).to(tl.uint32)
    key_1 = tl.load(keys_of_draws + 2 * draw).to(tl.uint32, bitcast=True)
    key_2 = tl.load(keys_of_draws + 2 * draw + 1).to(tl.uint32, bitcast=True)
    score = tl.where(here, weight.to(tl.float64) / arrivals(token, key_1, key_2), -1.0)
    place = draw * tl.num_programs(1) + block
    tl.store(scores + place, tl.max(score, 0))
    tl.store(places + place, block * BLOCK + tl.argmax(score, 0))
