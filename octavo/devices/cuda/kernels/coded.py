"""Products with codes as weights, in Triton: codes of weights times codes of activations on integer tensor cores.

Sums of integers are exact; what is in float32 has the order and the roundings of `octavo.ops.coded`, if launches do not
fuse products and sums. So bits depend neither on the tile nor on the number of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.devices.cuda.kernels.elementwise import rounded
from octavo.devices.cuda.kernels.linear import rows_of_expert


@triton.jit(do_not_specialize=["M"])
def quantize(
    x, order, owners, codes, scales, row_stride, M, K, KP,
    HAS_ORDER: tl.constexpr, HAS_OWNERS: tl.constexpr, PLANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the codes of a row of x [M, K], int8 [PLANES, M, KP], and its scale, float32 [M].

    HAS_OWNERS: `order` is [experts, K], and int32 owners [M] says whose a row has.
    See `octavo.ops.coded.quantize_activations`.
    """
    row = tl.program_id(0)
    here = x + row.to(tl.int64) * row_stride
    if HAS_OWNERS:
        order += tl.load(owners + row).to(tl.int64) * K
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
        code = tl.where(is_used, rounded(values * factor), 0.0)
        for plane in tl.static_range(PLANES):
            own = code
            if PLANES == 2:
                high = rounded(code * (1.0 / 254.0))
                own = high if plane == 0 else code - 254.0 * high
            tl.store(codes + (plane * M + row).to(tl.int64) * KP + at, own.to(tl.int8), mask=at < KP)


@triton.jit
def _codes(packed, HALF: tl.constexpr, IS_FLOAT: tl.constexpr):
    """Return codes int8 of a half of a step of 4 bits: floats twice as large, integers of the upper half 16 times.

    A mask takes four codes at once, where a shift takes one.
    """
    if IS_FLOAT:
        code = (packed >> (4 * HALF)).to(tl.int32) & 15
        size = code & 7
        magnitude = tl.maximum(tl.maximum(size, 2 * size - 4), 4 * size - 16)
        return tl.where(code > 7, -magnitude, magnitude).to(tl.int8)
    return packed.to(tl.int8, bitcast=True) & (15 if HALF == 0 else -16)


@triton.jit
def _with_group(
    acc, of_group, total, above, below, scales, zeros, super_scales, super_zeros, columns, column_in, group, groups,
    first, inputs, KP,
    BITS: tl.constexpr, SUPER: tl.constexpr, ZERO: tl.constexpr, IS_FLOAT: tl.constexpr,
):  # fmt: skip
    """Return `total` with the sums of one group more, and integers above and below of groups that share factors.

    acc: its codes times those of x. of_group: its codes of x. Its last input is the one before first + inputs.
    """
    at = columns * groups + group
    scale = tl.load(scales + at, mask=column_in, other=0)
    if ZERO == 1:
        zero = tl.load(zeros + at, mask=column_in, other=0).to(tl.int32)
        acc += ((128 if BITS == 8 else 0) - zero)[:, None] * of_group
    if ZERO == 2 and BITS == 8:
        acc += 128 * of_group
    if SUPER:
        above += acc * scale.to(tl.int32)[:, None]
        if ZERO == 2:
            least = tl.load(zeros + at, mask=column_in, other=0).to(tl.int32)
            below += of_group * least[:, None]
        if inputs % SUPER == 0:
            factor = columns * (KP // SUPER) + (first + inputs) // SUPER - 1
            of_scales = tl.load(super_scales + factor, mask=column_in, other=0.0).to(tl.float32)
            total += above.to(tl.float32) * of_scales[:, None]
            if ZERO == 2:
                of_zeros = tl.load(super_zeros + factor, mask=column_in, other=0.0).to(tl.float32)
                total -= below.to(tl.float32) * of_zeros[:, None]
            above, below = tl.zeros_like(above), tl.zeros_like(below)
    else:
        scale = scale.to(tl.float32) * (0.5 if IS_FLOAT else 1.0)
        total += acc.to(tl.float32) * scale[:, None]
        if ZERO == 2:
            least = tl.load(zeros + at, mask=column_in, other=0.0).to(tl.float32)
            total -= of_group.to(tl.float32) * least[:, None]
    return total, above, below


@triton.jit
def coded_product(
    x, weight, scales, zeros, super_scales, super_zeros, rows, columns, M, N, KP, G,
    BITS: tl.constexpr, GROUP: tl.constexpr, SUPER: tl.constexpr, ZERO: tl.constexpr, IS_FLOAT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Return coded weights [N, KP] times codes [M, KP], float32 [BN, BM] without the scales of rows.

    ZERO: 0 none, 1 zero points, 2 minimums. Steps have 64 inputs, and STEPS of them are read at once, which are whole
    ones of SUPER; of 4 bits, a byte has inputs j and j + 32 of one. Sums of codes of x are products with weights that
    are all the same.
    """
    k = tl.arange(0, 32)
    row_in, column_in = rows < M, columns < N
    total = tl.zeros([BN, BM], tl.float32)
    zero = tl.zeros([BN, BM], tl.int32)
    acc, upper, of_group, above, below = zero, zero, zero, zero, zero
    ones, eights = tl.full([BN, 32], 1, tl.int8), tl.full([BN, 32], -8 if ZERO == 0 else 8, tl.int8)
    x_at = x + rows[None, :] * KP + k[:, None]
    weight_at = weight + columns[:, None] * (KP * BITS // 8) + k[None, :]
    IS_SPLIT: tl.constexpr = BITS == 4 and not IS_FLOAT
    PARTS: tl.constexpr = 2 if GROUP == 16 else 1
    for first in range(0, KP, 64 * STEPS):
        for half in tl.static_range(2 * STEPS):
            a = tl.load(x_at + first + 32 * half, mask=row_in[None, :], other=0)
            at = first + 32 * half if BITS == 8 else first // 2 + 32 * (half // 2)
            w = tl.load(weight_at + at, mask=column_in[:, None], other=0)
            if BITS == 4:
                w = _codes(w, half % 2, IS_FLOAT)
            for part in tl.static_range(PARTS):
                own = a if PARTS == 1 else tl.where((k // 16 == part)[:, None], a, 0).to(tl.int8)
                if IS_SPLIT and half % 2 == 1:
                    upper = tl.dot(w, own, upper, out_dtype=tl.int32)
                else:
                    acc = tl.dot(w, own, acc, out_dtype=tl.int32)
                # codes of the lower half have no sign, those of the upper one have
                if IS_SPLIT and (half % 2 == 0) == (ZERO == 0):
                    acc = tl.dot(eights, own, acc, out_dtype=tl.int32)
                if ZERO != 0:
                    of_group = tl.dot(ones, own, of_group, out_dtype=tl.int32)
                inputs = 32 * half + 32 // PARTS * (part + 1)
                if GROUP != 0:  # noqa: SIM102
                    # a group that divides what is read at once ends at places that are known
                    if (inputs if (64 * STEPS) % GROUP == 0 else first + inputs) % GROUP == 0:
                        # beyond the last group there are zeros alone
                        group = tl.minimum((first + inputs - 1) // GROUP, G - 1)
                        total, above, below = _with_group(
                            acc + (upper >> 4) if IS_SPLIT else acc, of_group, total, above, below,
                            scales, zeros, super_scales, super_zeros, columns, column_in, group, G,
                            first, inputs, KP, BITS, SUPER, ZERO, IS_FLOAT,
                        )  # fmt: skip
                        acc, upper, of_group = zero, zero, zero
    if GROUP == 0:
        total, above, below = _with_group(
            acc + (upper >> 4) if IS_SPLIT else acc, of_group, total, above, below,
            scales, zeros, super_scales, super_zeros, columns, column_in, 0, 1, 0, 0, KP, BITS, SUPER, ZERO, IS_FLOAT,
        )  # fmt: skip
    return total


@triton.jit(do_not_specialize=["M", "G", "num_experts", "top_k"])
def coded_linear(
    x, row_scales, weight, scales, zeros, super_scales, super_zeros, bias, add, order, starts, out,
    out_stride, num_experts, top_k, M, N, KP, G,
    BITS: tl.constexpr, GROUP: tl.constexpr, SUPER: tl.constexpr, ZERO: tl.constexpr, IS_FLOAT: tl.constexpr,
    PLANES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ADDEND: tl.constexpr, IS_GATED: tl.constexpr,
    E: tl.constexpr, OF_TOKENS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Write a tile of the product of codes with a coded weight [N, KP]; with IS_GATED of silu(gate) * up.

    E: of a stack of weights, rows are multiplied with that of their expert; see `rows_of_expert`. 0 for one weight.
    """
    columns = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
    width = N // 2 if IS_GATED else N
    if E > 0:
        own, places, live, rows = rows_of_expert(order, starts, num_experts, top_k, E, OF_TOKENS, BM)
        if own >= num_experts:
            return
        rows = tl.where(live, rows, M)
        first = own * N
        groups = first * (1 if GROUP == 0 else G)
        weight += first * (KP * BITS // 8)
        scales += groups
        zeros += groups
        bias += first
        if SUPER:
            super_scales += first * (KP // SUPER)
            super_zeros += first * (KP // SUPER)
    else:
        places = tl.program_id(0) * BM + tl.arange(0, BM)
        live, rows = places < M, places.to(tl.int64)
    codes = rows
    if PLANES == 2:  # side by side, so that a thread has both sums of a token
        codes = tl.interleave(tl.where(rows < M, rows, 2 * M), rows + M)
    for half in tl.static_range(2 if IS_GATED else 1):
        outputs = columns + half * width
        value = coded_product(
            x, weight, scales, zeros, super_scales, super_zeros, codes, outputs, M * PLANES, N, KP, G,
            BITS, GROUP, SUPER, ZERO, IS_FLOAT, BM * PLANES, BN, STEPS,
        )  # fmt: skip
        if PLANES == 2:
            high, low = tl.split(tl.reshape(value, (BN, BM, 2)))
            value = high * 254.0 + low
        value = value * tl.load(row_scales + rows, mask=rows < M, other=0.0)[None, :]
        if HAS_BIAS:
            value += tl.load(bias + outputs, mask=outputs < N, other=0.0).to(tl.float32)[:, None]
        if HAS_ADDEND:
            of_add = (rows < M)[None, :] & (outputs < N)[:, None]
            value += tl.load(add + rows[None, :] * N + outputs[:, None], mask=of_add, other=0.0)
        if half == 0:
            total = value
        else:
            total = total / (1.0 + tl.exp(-total)) * value
    inside = live[None, :] & (columns < width)[:, None]
    at = places.to(tl.int64)[None, :] * out_stride + columns[:, None]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
