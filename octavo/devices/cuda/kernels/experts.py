"""Products of the experts of a mixture, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.devices.cuda.kernels.linear import product


@triton.jit(do_not_specialize=["num_rows"])
def experts(
    x, weights, biases, order, starts, out, row_stride, num_rows, num_experts, N, K,
    E: tl.constexpr, TOP_K: tl.constexpr, HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Write a tile of the rows of one expert times its weight, [N, K] of weights [experts, N, K].

    starts: int32 [num_experts + 1], the first row of each expert, from the first of the weights on. With TOP_K, x
    is [tokens, K], and row i is that of the token of pair `order[i]`. Tiles are numbered expert by expert; those beyond
    the last one do nothing, so that the host need not know how many there are. The sums are those of
    `linear` in one chunk.
    """
    tile = tl.program_id(0)
    expert = tl.arange(0, E)
    first = tl.load(starts + expert, mask=expert < num_experts, other=0)
    after = tl.load(starts + expert + 1, mask=expert < num_experts, other=0)
    tiles = (after - first + BM - 1) // BM
    ends = tl.cumsum(tiles, 0)
    own = tl.sum(((ends <= tile) & (expert < num_experts)).to(tl.int32), 0)
    if own >= num_experts:
        return
    is_own = expert == own
    row = tl.sum(tl.where(is_own, first + (tile - (ends - tiles)) * BM, 0), 0)
    end = tl.sum(tl.where(is_own, after, 0), 0)
    places = row + tl.arange(0, BM)
    live = places < end
    rows = places.to(tl.int64)
    if TOP_K > 0:
        rows = (tl.load(order + places, mask=live, other=0) // TOP_K).to(tl.int64)
    rows = tl.where(live, rows, num_rows)
    columns = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
    width = N // 2 if IS_GATED else N
    weight = weights + own.to(tl.int64) * N * K
    bias = biases + own.to(tl.int64) * N
    sums, up = product(
        x, weight, rows, columns, row_stride, num_rows, width, K, 0, K, BM, BN, BK, False, IS_GATED, TYPE
    )
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
    if IS_GATED:
        if HAS_BIAS:
            up += tl.load(bias + width + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
        sums = sums / (1.0 + tl.exp(-sums)) * up
    at = places.to(tl.int64)[:, None] * width + columns[None, :]
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=live[:, None] & (columns < width)[None, :])
