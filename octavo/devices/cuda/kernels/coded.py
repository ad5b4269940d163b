"""Products with codes as weights, in Triton: codes of activations times codes of weights on integer tensor cores.

Sums of integers are exact; what is in float32 has the order and the roundings of `octavo.ops.coded`, if launches do not
fuse products and sums. So bits depend neither on the tile nor on the number of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rounded(x):
    """Return the nearest whole number, the even one of two, of less than 2²² in magnitude."""
    return (x + 12582912.0) - 12582912.0


@triton.jit(do_not_specialize=["M"])
def quantize(
    x, order, codes, scales, sums, row_stride, M, K, KP,
    HAS_ORDER: tl.constexpr, PLANES: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the codes of a row of x [M, K], int8 [PLANES, M, KP], its scale, float32 [M], and sums of UNIT codes each.

    sums: int32 [PLANES, M, KP / UNIT]. See `octavo.ops.coded.quantize_activations`.
    """
    row = tl.program_id(0)
    here = x + row.to(tl.int64) * row_stride
    most = 127.0 if PLANES == 1 else 32384.0
    k = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    num_spoilt = tl.zeros([BLOCK], tl.int32)
    for first in range(0, K, BLOCK):
        values = tl.load(here + first + k, mask=first + k < K, other=0.0).to(tl.float32)
        is_finite = (values.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
        largest = tl.maximum(largest, tl.where(is_finite, tl.abs(values), 0.0))
        num_spoilt += tl.where(is_finite, 0, 1)
    peak, most_spoilt = tl.max(largest, 0), tl.max(num_spoilt, 0)
    is_used = (peak >= 1e-30) & (most_spoilt == 0)
    factor = tl.div_rn(most, tl.where(is_used, peak, 1.0))
    scale = tl.where(is_used, tl.div_rn(peak, most), 0.0)
    tl.store(scales + row, tl.where(most_spoilt > 0, float("nan"), scale))
    for first in range(0, KP, BLOCK):
        at = first + k
        source = at
        if HAS_ORDER:
            source = tl.load(order + at, mask=at < K, other=0)
        values = tl.load(here + source, mask=at < K, other=0.0).to(tl.float32)
        code = tl.where(is_used, _rounded(values * factor), 0.0)
        for plane in tl.static_range(PLANES):
            own = code
            if PLANES == 2:
                high = _rounded(code * (1.0 / 254.0))
                own = high if plane == 0 else code - 254.0 * high
            place = (plane * M + row).to(tl.int64)
            tl.store(codes + place * KP + at, own.to(tl.int8), mask=at < KP)
            unit = tl.sum(tl.reshape(own.to(tl.int32), [BLOCK // UNIT, UNIT]), 1)
            number = first // UNIT + tl.arange(0, BLOCK // UNIT)
            tl.store(sums + place * (KP // UNIT) + number, unit, mask=number < KP // UNIT)


@triton.jit
def _codes(packed, HALF: tl.constexpr, BITS: tl.constexpr, IS_FLOAT: tl.constexpr, IS_SIGNED: tl.constexpr):
    """Return codes int8 of a half of a step; floats are doubled, so that they are whole."""
    if BITS == 8:
        return packed
    code = (packed >> (4 * HALF)) & 15
    if IS_FLOAT:
        size = code & 7
        steps = size >> 1
        magnitude = tl.where(steps == 0, size, (2 + (size & 1)) << tl.where(steps == 0, 0, steps - 1)).to(tl.int8)
        return tl.where(code > 7, -magnitude, magnitude)
    return code.to(tl.int8) - 8 if IS_SIGNED else code.to(tl.int8)


@triton.jit
def coded_product(
    x, sums, weight, scales, zeros, super_scales, super_zeros, rows, columns, M, N, KP, G,
    BITS: tl.constexpr, GROUP: tl.constexpr, SUPER: tl.constexpr, ZERO: tl.constexpr, IS_FLOAT: tl.constexpr,
    UNIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Return codes [M, KP] times coded weights [N, KP], float32 [BM, BN] without the scales of rows.

    ZERO: 0 none, 1 zero points, 2 minimums. Steps have 64 inputs; of 4 bits, a byte has inputs j and j + 32 of one.
    """
    k = tl.arange(0, 32)
    row_in, column_in = rows < M, columns < N
    total = tl.zeros([BM, BN], tl.float32)
    acc = tl.zeros([BM, BN], tl.int32)
    above, below = tl.zeros([BM, BN], tl.int32), tl.zeros([BM, BN], tl.int32)
    of_group = tl.zeros([BM], tl.int32)
    groups = 1 if GROUP == 0 else G  # so that scales are read as vectors
    PARTS: tl.constexpr = 2 if GROUP == 16 else 1
    for step in range(0, KP, 64):
        for half in tl.static_range(2):
            start = step + 32 * half
            a = tl.load(x + rows[:, None] * KP + start + k[None, :], mask=row_in[:, None], other=0)
            at = start if BITS == 8 else step // 2
            b = tl.load(
                weight + columns[None, :] * (KP * BITS // 8) + at + k[:, None], mask=column_in[None, :], other=0
            )
            w = _codes(b, half, BITS, IS_FLOAT, ZERO == 0)
            for part in tl.static_range(PARTS):
                own = a if PARTS == 1 else tl.where((k // 16 == part)[None, :], a, 0).to(tl.int8)
                acc = tl.dot(own, w, acc, out_dtype=tl.int32)
                if ZERO != 0 and (UNIT < 64 or half == 1):
                    number = (start + 16 * part) // UNIT
                    of_group += tl.load(sums + rows * (KP // UNIT) + number, mask=row_in, other=0)
                end = start + 32 if PARTS == 1 else start + 16 * (part + 1)
                is_end = (end == KP) if GROUP == 0 else (end % GROUP == 0)
                if is_end:
                    # beyond the last group there are zeros alone
                    group = 0 if GROUP == 0 else tl.minimum((end - 1) // GROUP, G - 1)
                    scale = tl.load(scales + columns * groups + group, mask=column_in, other=0)
                    if ZERO == 1:
                        zero = tl.load(zeros + columns * groups + group, mask=column_in, other=0).to(tl.int32)
                        acc += ((128 if BITS == 8 else 0) - zero)[None, :] * of_group[:, None]
                    if ZERO == 2 and BITS == 8:
                        acc += (128 * of_group)[:, None]
                    if SUPER:
                        above += acc * scale.to(tl.int32)[None, :]
                        if ZERO == 2:
                            least = tl.load(zeros + columns * groups + group, mask=column_in, other=0).to(tl.int32)
                            below += of_group[:, None] * least[None, :]
                        if end % SUPER == 0:
                            factor = columns * (KP // SUPER) + (end - 1) // SUPER
                            of_scales = tl.load(super_scales + factor, mask=column_in, other=0.0).to(tl.float32)
                            total += above.to(tl.float32) * of_scales[None, :]
                            if ZERO == 2:
                                of_zeros = tl.load(super_zeros + factor, mask=column_in, other=0.0).to(tl.float32)
                                total -= below.to(tl.float32) * of_zeros[None, :]
                            above = tl.zeros([BM, BN], tl.int32)
                            below = tl.zeros([BM, BN], tl.int32)
                    else:
                        scale = scale.to(tl.float32) * (0.5 if IS_FLOAT else 1.0)
                        total += acc.to(tl.float32) * scale[None, :]
                        if ZERO == 2:
                            least = tl.load(zeros + columns * groups + group, mask=column_in, other=0.0).to(tl.float32)
                            total -= of_group.to(tl.float32)[:, None] * least[None, :]
                    acc = tl.zeros([BM, BN], tl.int32)
                    of_group = tl.zeros([BM], tl.int32)
    return total


@triton.jit
def _value(
    x, sums, row_scales, weight, scales, zeros, super_scales, super_zeros, bias, add, rows, columns, first, M, N, KP, G,
    BITS: tl.constexpr, GROUP: tl.constexpr, SUPER: tl.constexpr, ZERO: tl.constexpr, IS_FLOAT: tl.constexpr,
    UNIT: tl.constexpr, PLANES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ADDEND: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Return what the rows of the weight from `first` on give, with bias and addend."""
    columns += first
    total = coded_product(
        x, sums, weight, scales, zeros, super_scales, super_zeros, rows, columns, M, N, KP, G,
        BITS, GROUP, SUPER, ZERO, IS_FLOAT, UNIT, BM, BN,
    )  # fmt: skip
    if PLANES == 2:
        second = coded_product(
            x + M.to(tl.int64) * KP, sums + M.to(tl.int64) * (KP // UNIT), weight, scales, zeros, super_scales,
            super_zeros, rows, columns, M, N, KP, G, BITS, GROUP, SUPER, ZERO, IS_FLOAT, UNIT, BM, BN,
        )  # fmt: skip
        total = total * 254.0 + second
    total = total * tl.load(row_scales + rows, mask=rows < M, other=0.0)[:, None]
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if HAS_ADDEND:
        inside = (rows < M)[:, None] & (columns < N)[None, :]
        total += tl.load(add + rows[:, None] * N + columns[None, :], mask=inside, other=0.0)
    return total


@triton.jit(do_not_specialize=["M", "G"])
def coded_linear(
    x, sums, row_scales, weight, scales, zeros, super_scales, super_zeros, bias, add, out, out_stride, M, N, KP, G,
    BITS: tl.constexpr, GROUP: tl.constexpr, SUPER: tl.constexpr, ZERO: tl.constexpr, IS_FLOAT: tl.constexpr,
    UNIT: tl.constexpr, PLANES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ADDEND: tl.constexpr,
    IS_GATED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write a tile of the product of codes with a coded weight [N, KP]; with IS_GATED of silu(gate) * up."""
    rows = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    columns = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
    width = N // 2 if IS_GATED else N
    total = _value(
        x, sums, row_scales, weight, scales, zeros, super_scales, super_zeros, bias, add, rows, columns, 0, M, N, KP, G,
        BITS, GROUP, SUPER, ZERO, IS_FLOAT, UNIT, PLANES, HAS_BIAS, HAS_ADDEND, BM, BN,
    )  # fmt: skip
    if IS_GATED:
        up = _value(
            x, sums, row_scales, weight, scales, zeros, super_scales, super_zeros, bias, add, rows, columns, width,
            M, N, KP, G, BITS, GROUP, SUPER, ZERO, IS_FLOAT, UNIT, PLANES, HAS_BIAS, HAS_ADDEND, BM, BN,
        )  # fmt: skip
        total = total / (1.0 + tl.exp(-total)) * up
    inside = (rows < M)[:, None] & (columns < width)[None, :]
    tl.store(out + rows[:, None] * out_stride + columns[None, :], total.to(out.dtype.element_ty), mask=inside)
