"""Products of the experts of a mixture, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.devices.cuda.kernels.linear import product


@triton.jit
def rows_of_expert(order, starts, num_experts, top_k, E: tl.constexpr, OF_TOKENS: tl.constexpr, BM: tl.constexpr):
    """Return the expert of the program's tile, the places of its rows among all, which of them there are, and where x
    has them.

    starts: int32 [num_experts + 1], the first row of each expert, from the first of the weights on. OF_TOKENS: row i of
    x is that of the token of pair `order[i]`. Tiles are numbered expert by expert; those beyond the last one have the
    expert `num_experts`, so that the host need not know how many there are.
    """
    tile = tl.program_id(0)
    expert = tl.arange(0, E)
    first = tl.load(starts + expert, mask=expert < num_experts, other=0)
    after = tl.load(starts + expert + 1, mask=expert < num_experts, other=0)
    tiles = (after - first + BM - 1) // BM
    ends = tl.cumsum(tiles, 0)
    own = tl.sum(((ends <= tile) & (expert < num_experts)).to(tl.int32), 0)
    is_own = expert == own
    places = tl.sum(tl.where(is_own, first + (tile - (ends - tiles)) * BM, 0), 0) + tl.arange(0, BM)
    live = places < tl.sum(tl.where(is_own, after, 0), 0)
    rows = places
    if OF_TOKENS:
        rows = tl.load(order + places, mask=live, other=0) // top_k
    return own.to(tl.int64), places, live, rows.to(tl.int64)


@triton.jit(do_not_specialize=["num_rows", "num_experts", "top_k"])
def experts(
    x, weights, scales, biases, order, starts, out, row_stride, num_rows, num_experts, top_k, N, K,
    E: tl.constexpr, OF_TOKENS: tl.constexpr, HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Write a tile of the rows of one expert times its weight, [N, K] of weights [experts, N, K].

    The sums are those of `linear` in one chunk.
    """
    own, places, live, rows = rows_of_expert(order, starts, num_experts, top_k, E, OF_TOKENS, BM)
    if own >= num_experts:
        return
    rows = tl.where(live, rows, num_rows)
    columns = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
    width = N // 2 if IS_GATED else N
    bias = biases + own * N
    num_groups = tl.cdiv(K, GROUP) if GROUP > 1 else 1
    sums, up = product(
        x, weights + own * N * K, scales + own * N * num_groups, rows, columns, row_stride, num_rows, width, K, 0, K,
        BM, BN, BK, False, IS_GATED, GROUP, TYPE, 0,
    )  # fmt: skip
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
    if IS_GATED:
        if HAS_BIAS:
            up += tl.load(bias + width + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
        sums = sums / (1.0 + tl.exp(-sums)) * up
    at = places.to(tl.int64)[:, None] * width + columns[None, :]
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=live[:, None] & (columns < width)[None, :])
