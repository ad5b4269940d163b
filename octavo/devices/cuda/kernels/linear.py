"""Products with weights, and with those of the experts of a mixture, whose sums have one order for any number of rows,
in Triton.

Inputs are summed up in chunks, which are put together in ascending order, whether one program computes all of them or
each has a program of its own. In a chunk the tensor cores add them in ascending order, whatever the tile is: those of
Hopper give the same bits by the instructions for 16 rows and by those for 64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.devices.cuda.kernels.dependent import wait_for_earlier
from octavo.devices.cuda.kernels.elementwise import factors


@triton.jit
def product(
    x, weight, scales, rows, columns, row_stride, M, N, K, first, end,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, IS_GATED: tl.constexpr,
    GROUP: tl.constexpr, TYPE: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Return the sums of the inputs [first, end) for a tile, and with IS_GATED those of the columns N further on.

    EVEN: inputs and columns are whole tiles. GROUP: of a weight in floats of 8 bits, inputs that share a scale, whole
    BK, or 1 where all do; 0 for a plain weight. scales: float32 [all columns, groups]. LAST: with EVEN, so many of the
    last weights are requested before earlier launches are waited for, and multiplied last, which changes no bit.
    """
    k = tl.arange(0, BK)
    num_groups = tl.cdiv(K, GROUP) if GROUP > 1 else 1
    sums = tl.zeros([BM, BN], tl.float32)
    others = tl.zeros([BM, BN], tl.float32)
    stop = end
    if LAST > 0:
        last_k = end - LAST + tl.arange(0, LAST)
        is_ours = (last_k >= first)[None, :]  # of fewer inputs the rest are zeros, in front of them
        last_at = columns[:, None] * K + last_k[None, :]
        last_own = tl.load(weight + last_at, mask=is_ours, other=0.0)
        if IS_GATED:
            last_other = tl.load(weight + N.to(tl.int64) * K + last_at, mask=is_ours, other=0.0)
        wait_for_earlier(True)
        last_x = x + rows[:, None] * row_stride + last_k[None, :]
        last_a = tl.load(last_x, mask=(rows < M)[:, None] & is_ours, other=0.0)
        stop = tl.maximum(first, end - LAST)
    for start in range(first, stop, BK):
        inside = (start + k < end)[None, :]
        live = columns < N
        read, read_x = live[:, None] & inside, (rows < M)[:, None]
        if not EVEN:
            read_x = read_x & inside
        a = tl.load(x + rows[:, None] * row_stride + (start + k)[None, :], mask=read_x, other=0.0).to(TYPE)
        at = weight + columns[:, None] * K + (start + k)[None, :]
        scale = scales + columns * num_groups + (start // GROUP if GROUP > 1 else 0)
        own = _read(at, scale, read, live, EVEN, GROUP, x.dtype.element_ty).to(TYPE)
        sums = tl.dot(a, tl.trans(own), sums, input_precision="ieee")
        if IS_GATED:
            further = N.to(tl.int64)
            at, scale = at + further * K, scale + further * num_groups
            other = _read(at, scale, read, live, EVEN, GROUP, x.dtype.element_ty).to(TYPE)
            others = tl.dot(a, tl.trans(other), others, input_precision="ieee")
    if LAST > 0:
        sums = tl.dot(last_a.to(TYPE), tl.trans(last_own.to(TYPE)), sums, input_precision="ieee")
        if IS_GATED:
            others = tl.dot(last_a.to(TYPE), tl.trans(last_other.to(TYPE)), others, input_precision="ieee")
    return sums, others


@triton.jit
def _read(at, scale, mask, live, EVEN: tl.constexpr, GROUP: tl.constexpr, TYPE: tl.constexpr):
    """Return weights; of floats of 8 bits, the numbers of TYPE that plain ones would be."""
    if EVEN:
        found = tl.load(at)
    else:
        found = tl.load(at, mask=mask, other=0.0)
    if GROUP > 0:
        scales = tl.load(scale, mask=live, other=0.0)
        if found.dtype == tl.uint8:
            values = factors(found, tl.float32)
            scales = scales * 256.0
        else:
            values = found.to(tl.float16).to(tl.float32)
        found = (values * scales[:, None]).to(TYPE)
    return found


@triton.jit(do_not_specialize=["M"])
def linear(
    x, weight, scales, bias, add, out, parts, arrived, row_stride, out_stride, M, N, K, chunk,
    HAS_BIAS: tl.constexpr, HAS_ADDEND: tl.constexpr, IS_GATED: tl.constexpr,
    CHUNKS: tl.constexpr, IS_DIVIDED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, GROUP: tl.constexpr, TYPE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Write a tile of x [M, K] @ weight [N, K].T + bias + add; with IS_GATED of silu(gate) * up, N / 2 columns.

    IS_DIVIDED: each chunk has a program, and the last one to arrive puts them together. parts: float32
    [CHUNKS, M, columns]. arrived: int32 [tiles of columns], 0 before and after; only one tile of rows may be divided.
    """
    rows = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    columns = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
    width = N // 2 if IS_GATED else N
    inside = (rows < M)[:, None] & (columns < width)[None, :]
    HAS_LAST: tl.constexpr = IS_DEPENDENT and EVEN and GROUP == 0 and BM <= 16 and (IS_DIVIDED or CHUNKS == 1)
    LAST: tl.constexpr = (256 if IS_GATED else 512) if HAS_LAST else 0
    wait_for_earlier(IS_DEPENDENT and LAST == 0)
    first = tl.program_id(2) * chunk if IS_DIVIDED else 0
    sums, up = product(
        x, weight, scales, rows, columns, row_stride, M, width, K, first, tl.minimum(first + chunk, K),
        BM, BN, BK, EVEN, IS_GATED, GROUP, TYPE, LAST,
    )  # fmt: skip
    if IS_DIVIDED:
        at = parts + rows[:, None] * width + columns[None, :]
        size = M.to(tl.int64) * width
        tl.store(at + tl.program_id(2) * size, sums, mask=inside)
        tl.debug_barrier()  # all threads have written before one of them counts the program
        if tl.atomic_add(arrived + tl.program_id(1), 1, sem="acq_rel") != CHUNKS - 1:
            return
        tl.store(arrived + tl.program_id(1), 0)
        sums = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
        for number in range(1, CHUNKS):
            sums += tl.load(at + number * size, mask=inside, other=0.0, cache_modifier=".cg")
    else:
        for number in range(1, CHUNKS):  # products with a gate have one chunk
            first, last = number * chunk, tl.minimum((number + 1) * chunk, K)
            more, _ = product(
                x, weight, scales, rows, columns, row_stride, M, width, K, first, last,
                BM, BN, BK, EVEN, False, GROUP, TYPE, 0,
            )  # fmt: skip
            sums += more
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
    if HAS_ADDEND:
        sums += tl.load(add + rows[:, None] * N + columns[None, :], mask=inside, other=0.0)
    if IS_GATED:
        if HAS_BIAS:
            up += tl.load(bias + width + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
        if HAS_ADDEND:
            up += tl.load(add + rows[:, None] * N + width + columns[None, :], mask=inside, other=0.0)
        sums = sums / (1.0 + tl.exp(-sums)) * up
    tl.store(out + rows[:, None] * out_stride + columns[None, :], sums.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def chunks_at_once(
    x, weight, bias, add, out, row_stride, out_stride, M, N, K, chunk,
    HAS_BIAS: tl.constexpr, HAS_ADDEND: tl.constexpr, CHUNKS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TYPE: tl.constexpr, IS_DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Write BN columns of x [M, K] @ weight [N, K].T + bias + add, of up to BM rows and 2 or 4 equal chunks.

    Warps compute the chunks beside each other: the same sums in the same order as those of `linear`, which go through
    memory. Columns and chunks are whole tiles.
    """
    rows, k = tl.arange(0, BM).to(tl.int64), tl.arange(0, BK)
    columns = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    firsts, live = tl.arange(0, CHUNKS)[:, None] * chunk, (rows < M)[None, :, None]
    of_x, of_weight = x + rows[None, :, None] * row_stride, weight + columns[None, :, None] * K
    LAST: tl.constexpr = 256 if IS_DEPENDENT else 0  # of each chunk, requested before earlier launches are waited for
    if IS_DEPENDENT:
        last = (firsts + chunk - LAST + tl.arange(0, LAST)[None, :])[:, None, :]
        last_own = tl.load(of_weight + last)
        wait_for_earlier(True)
        last_a = tl.load(of_x + last, mask=live, other=0.0)
    sums = tl.zeros([CHUNKS, BM, BN], tl.float32)
    for start in range(0, chunk - LAST, BK):
        at = (firsts + start + k[None, :])[:, None, :]
        a, own = tl.load(of_x + at, mask=live, other=0.0).to(TYPE), tl.load(of_weight + at).to(TYPE)
        sums = tl.dot(a, tl.permute(own, (0, 2, 1)), sums, input_precision="ieee")
    if IS_DEPENDENT:
        sums = tl.dot(last_a.to(TYPE), tl.permute(last_own.to(TYPE), (0, 2, 1)), sums, input_precision="ieee")
    parts = tl.permute(sums, (1, 2, 0))
    if CHUNKS == 2:
        first, second = tl.split(parts)
        total = first + second
    else:
        tl.static_assert(CHUNKS == 4)
        even, odd = tl.split(tl.reshape(parts, (BM, BN, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        total = first + second + third + fourth
    if HAS_BIAS:
        total += tl.load(bias + columns).to(tl.float32)[None, :]
    if HAS_ADDEND:
        total += tl.load(add + rows[:, None] * N + columns[None, :], mask=inside, other=0.0)
    tl.store(out + rows[:, None] * out_stride + columns[None, :], total.to(out.dtype.element_ty), mask=inside)


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
