"""Products with weights whose sums have one order for any number of rows, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(x, weight, rows, columns, row_stride, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
             TYPE: tl.constexpr):  # fmt: skip
    k = tl.arange(0, BK)
    sums = tl.zeros([BM, BN], tl.float32)
    for first in range(0, K, BK):
        inside = first + k < K
        a = tl.load(
            x + rows[:, None] * row_stride + (first + k)[None, :],
            mask=(rows < M)[:, None] & inside[None, :],
            other=0.0,
        )
        b = tl.load(
            weight + columns[None, :] * K + (first + k)[:, None],
            mask=(columns < N)[None, :] & inside[:, None],
            other=0.0,
        )
        sums += tl.dot(a.to(TYPE), b.to(TYPE), input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["M"])
def linear(
    x, weight, bias, add, out, row_stride, out_stride, M, N, K,
    HAS_BIAS: tl.constexpr, HAS_ADDEND: tl.constexpr, IS_GATED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Write a tile of x [M, K] @ weight [N, K].T + bias + add; with IS_GATED of silu(gate) * up, N / 2 columns.

    The inputs are summed up in steps of BK in ascending order, whatever M is.
    """
    rows = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    columns = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
    width = N // 2 if IS_GATED else N
    sums = product(x, weight, rows, columns, row_stride, M, width, K, BM, BN, BK, TYPE)
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
    inside = (rows < M)[:, None] & (columns < width)[None, :]
    if HAS_ADDEND:
        sums += tl.load(add + rows[:, None] * N + columns[None, :], mask=inside, other=0.0)
    if IS_GATED:
        up = product(x, weight + width.to(tl.int64) * K, rows, columns, row_stride, M, width, K, BM, BN, BK, TYPE)
        if HAS_BIAS:
            up += tl.load(bias + width + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
        if HAS_ADDEND:
            up += tl.load(add + rows[:, None] * N + width + columns[None, :], mask=inside, other=0.0)
        sums = sums / (1.0 + tl.exp(-sums)) * up
    tl.store(out + rows[:, None] * out_stride + columns[None, :], sums.to(out.dtype.element_ty), mask=inside)
