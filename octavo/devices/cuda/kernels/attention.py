"""Attention over the paged cache, in Triton.

Keys are taken in chunks at absolute positions, and chunks are put together in ascending order, whether one program
computes all of them or each has a program of its own: so a query's bits depend neither on how a step is divided nor on
what else is in it. Source of the sums: Milakov and Gimelshein, https://arxiv.org/abs/1805.02867; of the division:
https://pytorch.org/blog/flash-decoding/.

Keys and values may be codes of 8 bits: CODES is 1 for integers, 2 for floats (e4m3), else 0. A head of a block is then
its codes [BLOCK, DIM], and behind them their scales, float32 [BLOCK].
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.devices.cuda.kernels.dependent import wait_for_earlier
from octavo.devices.cuda.kernels.elementwise import factors, rounded

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e20)
AT_ONCE = tl.constexpr(8)
"""Chunks that `merge` requests before it awaits the first of them."""
UNSEEN = tl.constexpr(-1.0e30)
"""Of keys that a query does not see: its weight is 0 beside LOWEST too, which is the largest score of no keys."""


@triton.jit
def store(
    k, v, keys, values, slots, k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    block_stride, cache_head_stride, slot_stride,
    DIM: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Write one head of one token of k, or of v [tokens, heads, dim], to its slot in its plane of the cache.

    Codes are those of `octavo.attention.cache_format.quantize`, whose bits they have without fusion.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, D)
    slot = tl.load(slots + token)
    source, plane = k + token * k_token_stride + head * k_head_stride, keys
    if tl.program_id(2) == 1:
        source, plane = v + token * v_token_stride + head * v_head_stride, values
    block = plane + (slot // BLOCK) * block_stride + head * cache_head_stride
    target = block + (slot % BLOCK) * (DIM if CODES else slot_stride) + d
    if CODES == 0:
        tl.store(target, tl.load(source + d, mask=d < DIM).to(keys.dtype.element_ty), mask=d < DIM)
        return
    x = tl.load(source + d, mask=d < DIM, other=0.0).to(tl.float32)
    largest = 127.0 if CODES == 1 else 448.0
    is_finite = (x.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
    is_spoilt = tl.max(tl.where(is_finite, 0, 1), 0) > 0
    x = tl.where(is_finite, x, 0.0)
    amplitude = tl.max(tl.abs(x), 0)
    factor = tl.where(amplitude > 0, tl.div_rn(largest, tl.where(amplitude > 0, amplitude, 1.0)), 0.0)
    scaled = x * factor
    if CODES == 1:
        codes = rounded(scaled).to(tl.int32)
    else:
        bits = scaled.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # half to even on three bits of the mantissa; below 2⁻⁶ codes are multiples of 2⁻⁹
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
        small = rounded(tl.abs(scaled) * 512.0).to(tl.int32)
        codes = tl.where(tl.abs(scaled) < 0.015625, small, normal) | ((bits >> 24) & 0x80)
    tl.store(target, codes.to(tl.uint8), mask=d < DIM)
    scale = tl.where(is_spoilt, float("nan"), tl.div_rn(amplitude, largest))
    tl.store((block + BLOCK * DIM + (slot % BLOCK) * 4).to(tl.pointer_type(tl.float32), bitcast=True), scale)


@triton.jit
def _factors(codes, CODES: tl.constexpr, TYPE: tl.constexpr):
    """Return what codes stand for; of floats the 256th part, whose bits are those of a float16."""
    if CODES == 1:
        return codes.to(tl.int8, bitcast=True).to(TYPE)
    return factors(codes, TYPE)


@triton.jit
def _scales(plane, block, slot, block_stride, read, DIM: tl.constexpr, BLOCK: tl.constexpr, CODES: tl.constexpr):
    """Return the scales of the keys or values in slots of blocks; those that are not read are 0."""
    at = (plane + block * block_stride + BLOCK * DIM + slot * 4).to(tl.pointer_type(tl.float32), bitcast=True)
    scales = tl.load(at, mask=read, other=0.0)
    return scales * 256.0 if CODES == 2 else scales


@triton.jit
def _merged(m, total, sums, peak, weight, part):
    """Return both groups of keys as one: (largest score, sum of weights, weighted values) of each."""
    higher = tl.maximum(m, peak)
    kept, added = tl.exp2(m - higher), tl.exp2(peak - higher)
    return higher, total * kept + weight * added, sums * kept[:, None] + part * added[:, None]


@triton.jit
def _with_sinks(m, total, sums, sink):
    """Return the same with one key more, of that score and without a value."""
    higher = tl.maximum(m, sink * LOG2_E)
    kept = tl.exp2(m - higher)
    return total * kept + tl.exp2(sink * LOG2_E - higher), sums * kept[:, None]


@triton.jit
def _tile(
    q, peak, weights, part, pos, low, end, first, table, keys, values, block_stride, slot_stride,
    scale, window, slopes, ones,
    DIM: tl.constexpr, D: tl.constexpr, VALUE: tl.constexpr, DV: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, HAS_WINDOW: tl.constexpr, AHEAD: tl.constexpr, CAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
    TYPE: tl.constexpr, CODES: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Return (largest score, sums of weights, weighted values) with the keys [first, first + TILE) too.

    Scores have the base 2, so that a weight takes one fused product and sum. IS_MASKED: some query may not see a key.
    """
    d, dv = tl.arange(0, D), tl.arange(0, DV)
    t = first + tl.arange(0, TILE)
    # keys that no query of the tile sees are not read: their block may be gone
    read = tl.full([TILE], True, tl.int1)
    if IS_MASKED:
        read = t < end
    if HAS_WINDOW:
        read = read & (t >= low)
    slot = t.to(tl.uint32) % BLOCK
    block = tl.load(table + t.to(tl.uint32) // BLOCK, mask=read, other=0).to(tl.int64)
    row = block * block_stride + slot * slot_stride
    k_read = read[:, None] if DIM == D else read[:, None] & (d < DIM)[None, :]
    k = tl.load(keys + row[:, None] + d[None, :], mask=k_read, other=0)
    s = tl.dot(q, tl.trans(k.to(TYPE) if CODES == 0 else _factors(k, CODES, TYPE)), input_precision="ieee")
    factor = LOG2_E
    if CODES != 0:
        s *= (_scales(keys, block, slot, block_stride, read, DIM, BLOCK, CODES) * scale)[None, :]
    elif CAP > 0 or HAS_SLOPES:
        s *= scale
    else:
        factor = scale * LOG2_E
    if CAP > 0:
        s = CAP * (1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2_E / CAP)) + 1.0))
    if HAS_SLOPES:
        s += slopes[:, None] * (t[None, :] - pos[:, None]).to(tl.float32)
    if IS_MASKED:
        seen = t[None, :] <= tl.minimum(pos + AHEAD, end - 1)[:, None]
        if HAS_WINDOW:
            seen = seen & (t[None, :] > pos[:, None] - window)
        s = tl.where(seen, s, UNSEEN)
    higher = tl.maximum(peak, tl.max(s, 1) * factor)
    p = tl.exp2(tl.fma(s, factor, -higher[:, None]))
    kept = tl.exp2(peak - higher)[:, None]
    v_read = read[:, None] if VALUE == DV else read[:, None] & (dv < VALUE)[None, :]
    v = tl.load(values + row[:, None] + dv[None, :], mask=v_read, other=0)
    # by tensor cores, whose order is the same for any number of rows; that of a sum over threads is not
    weights = tl.dot(p.to(TYPE), ones, weights * kept, input_precision="ieee")
    if CODES != 0:
        of_values = _scales(values, block, slot, block_stride, read, DIM, BLOCK, CODES)
        if tl.float16 == TYPE:  # whose range weights times scales may leave
            v = (_factors(v, CODES, tl.float32) * of_values[:, None]).to(TYPE)
        else:
            v = _factors(v, CODES, TYPE)
            p = p * of_values[None, :]
    return higher, weights, tl.dot(p.to(TYPE), v.to(TYPE), part * kept, input_precision="ieee")


@triton.jit(do_not_specialize=["table_stride", "num_chunks", "num_heads", "group", "share", "window"])
def attend(
    q, keys, values, tables, lengths, work, slopes, sinks, out, parts, peaks,
    token_stride, head_stride, block_stride, cache_head_stride, slot_stride, table_stride, scale, num_chunks,
    num_heads, group, share, window,
    DIM: tl.constexpr, D: tl.constexpr, VALUE: tl.constexpr, DV: tl.constexpr, M: tl.constexpr, CHUNK: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, HAS_WINDOW: tl.constexpr, AHEAD: tl.constexpr, CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr, HAS_SINKS: tl.constexpr, SPLIT: tl.constexpr, TYPE: tl.constexpr, CODES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Attend with M rows: tokens of one sequence times `group` heads. They share one of keys with share - 1 others.

    work: int32 [programs, 4]: row of the step, first token among all, tokens here, position of the first one. SPLIT:
    the program computes the chunk of its third index alone, of one token, for `merge`. CHUNK: 0 for all keys in one.
    """
    wait_for_earlier(IS_DEPENDENT)
    # the last tokens of a prompt first: they have the most keys
    number, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    item = work + 4 * number
    row, first, count, position = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    length = tl.load(lengths + row)
    rows = tl.arange(0, M)
    token, head_of = rows // group, head * group + rows % group
    live = (token < count) & (rows < (M // group) * group)
    d, dv = tl.arange(0, D), tl.arange(0, DV)
    written = live[:, None] & (dv < VALUE)[None, :]
    pos = position + token
    low = tl.maximum(0, position - window + 1) if HAS_WINDOW else 0
    end = tl.minimum(position + count + AHEAD, length)
    at = (first + token).to(tl.int64)[:, None] * token_stride + head_of[:, None] * head_stride + d[None, :]
    queries = tl.load(q + at, mask=live[:, None] & (d < DIM)[None, :], other=0.0).to(TYPE)
    slope = tl.load(slopes + head_of, mask=live, other=0.0) if HAS_SLOPES else tl.zeros([M], tl.float32)
    table = tables + row * table_stride
    keys += head // share * cache_head_stride
    values += head // share * cache_head_stride
    place = (first + token) * num_heads + head_of
    IS_MERGED: tl.constexpr = CHUNK != 0 and not SPLIT
    HAS_INNER: tl.constexpr = M > 16 and not HAS_WINDOW  # of single tokens one more loop costs more than it saves
    start, stop = low // (CHUNK if CHUNK else TILE) * (CHUNK if CHUNK else TILE), end
    if SPLIT:
        start = tl.program_id(2) * CHUNK
        stop = tl.minimum(start + CHUNK, end)
        if (start >= end) | (start + CHUNK <= low):
            return
    m, total, sums = tl.full([M], LOWEST, tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, DV], tl.float32)
    ones = tl.full([TILE, 16], 1.0, TYPE)
    peak, weights, part = m, tl.zeros([M, 16], tl.float32), sums
    # comparisons are a third of a tile's instructions: tiles of keys that all queries see have none
    inner = tl.minimum(position + 1 + AHEAD, end) // TILE * TILE if HAS_INNER else start
    for is_last in tl.static_range(0 if HAS_INNER else 1, 2):
        for key in range(inner if is_last else start, stop if is_last else inner, TILE):
            peak, weights, part = _tile(
                queries, peak, weights, part, pos, low, end, key, table, keys, values, block_stride, slot_stride,
                scale, window, slope, ones,
                DIM, D, VALUE, DV, TILE, BLOCK, HAS_WINDOW, AHEAD, CAP, HAS_SLOPES, TYPE, CODES, is_last,
            )  # fmt: skip
            if IS_MERGED:  # noqa: SIM102
                if (key + TILE) % CHUNK == 0:
                    m, total, sums = _merged(m, total, sums, peak, tl.max(weights, 1), part)
                    peak = tl.full([M], LOWEST, tl.float32)
                    weights, part = tl.zeros([M, 16], tl.float32), tl.zeros([M, DV], tl.float32)
    if SPLIT:
        at_part = (number * num_heads + head_of) * num_chunks + tl.program_id(2)
        tl.store(parts + at_part.to(tl.int64)[:, None] * VALUE + dv[None, :], part, mask=written)
        tl.store(peaks + at_part * 2, peak, mask=live)
        tl.store(peaks + at_part * 2 + 1, tl.max(weights, 1), mask=live)
        return
    if IS_MERGED:  # no keys change no bit
        m, total, sums = _merged(m, total, sums, peak, tl.max(weights, 1), part)
    else:
        m, total, sums = peak, tl.max(weights, 1), part
    if HAS_SINKS:
        total, sums = _with_sinks(m, total, sums, tl.load(sinks + head_of, mask=live, other=0.0))
    result = sums / tl.where(live, total, 1.0)[:, None]
    at = place.to(tl.int64)[:, None] * VALUE + dv[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=written)


@triton.jit(do_not_specialize=["num_chunks", "num_heads", "window"])
def merge(
    parts, peaks, work, lengths, sinks, out, num_chunks, num_heads, window,
    VALUE: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr, HAS_WINDOW: tl.constexpr,
    AHEAD: tl.constexpr, HAS_SINKS: tl.constexpr, IS_DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Put the chunks of one head of one token together, as `attend` does without SPLIT; one token for each of work."""
    wait_for_earlier(IS_DEPENDENT)
    item, head = work + 4 * tl.program_id(0), tl.program_id(1)
    row, token, position = tl.load(item), tl.load(item + 1), tl.load(item + 3)
    end = tl.minimum(position + 1 + AHEAD, tl.load(lengths + row))
    low = tl.maximum(0, position - window + 1) if HAS_WINDOW else 0
    dv = tl.arange(0, DV)
    place = token * num_heads + head + tl.arange(0, 1)
    of_head = tl.program_id(0) * num_heads + head + tl.arange(0, 1)
    m, total, sums = tl.full([1], LOWEST, tl.float32), tl.zeros([1], tl.float32), tl.zeros([1, DV], tl.float32)
    first, stop = low // CHUNK, tl.cdiv(end, CHUNK)
    for group in range(first, stop, AT_ONCE):
        found = ()
        for number in tl.static_range(AT_ONCE):
            chunk = group + number + tl.arange(0, 1)
            part, is_there = of_head * num_chunks + chunk, chunk < stop  # no keys change no bit
            peak = tl.load(peaks + part * 2, mask=is_there, other=LOWEST)
            weight = tl.load(peaks + part * 2 + 1, mask=is_there, other=0.0)
            at = parts + part.to(tl.int64)[:, None] * VALUE + dv[None, :]
            one = tl.load(at, mask=is_there[:, None] & (dv < VALUE)[None, :], other=0.0)
            found = found + ((peak, weight, one),)  # noqa: RUF005 - Triton unpacks nothing
        for number in tl.static_range(AT_ONCE):
            peak, weight, part_sums = found[number]
            m, total, sums = _merged(m, total, sums, peak, weight, part_sums)
    if HAS_SINKS:
        total, sums = _with_sinks(m, total, sums, tl.load(sinks + head))
    result = sums / total[:, None]
    at = out + place.to(tl.int64)[:, None] * VALUE + dv[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=(dv < VALUE)[None, :])
