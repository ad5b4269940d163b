"""The layers of a decode step of a dense decoder in one launch, in Triton; see `benchmarks.gpu.persistent`.

Every program stays on its multiprocessor. A layer has five phases, and all programs pass a barrier before each. What a
phase reads that no phase writes (weights, earlier keys and values) a program requests before it waits there.

A tile of a weight is loaded as tensor cores read it: a lane has eight inputs of an output, which stand for four inputs
of each of two products. So weights go from memory to tensor cores by registers alone. Warps divide the inputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

ALL = tl.constexpr(-1)
QKV, ATTENTION, OUT, GATED, DOWN = (tl.constexpr(phase) for phase in range(5))
COLUMNS = tl.constexpr(10)
"""Pointers of a layer: its norm, qkv, the norms of queries and keys, out, the norm of its MLP, gate and up, down; the
planes of its cache."""
ROWS = tl.constexpr(16)
"""Of an instruction of tensor cores."""
LOG2_E = tl.constexpr(1.4426950408889634)
UNSEEN = tl.constexpr(-1.0e30)
RETURNS = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9))
"""Whether Triton compiles functions that return early here, which takes no register more; before it does not."""


@triton.jit
def _pointer(layers, layer, COLUMN: tl.constexpr, LIKE: tl.constexpr):
    """Return a pointer of a layer, to 16 bytes or more that are aligned."""
    found = tl.load(layers + layer * COLUMNS + COLUMN).to(tl.pointer_type(LIKE))
    return tl.multiple_of(found, 16)


@triton.jit
def _tile(
    source, first, rows, k, STRIDE: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, S: tl.constexpr,
    IS_PAIRED: tl.constexpr,
):  # fmt: skip
    """Return rows [first, first + BN) of source [rows, K] from the input k on, as [BN / 8, BK / 32 / S, S, 8, 32]; 0
    outside of it. IS_PAIRED: each row of the first half is followed by one of the second."""
    b, r = tl.arange(0, BN // 8)[:, None, None, None, None], tl.arange(0, 8)[None, None, None, :, None]
    c, s = tl.arange(0, BK // 32 // S)[None, :, None, None, None], tl.arange(0, S)[None, None, :, None, None]
    at = k + (c * S + s) * 32 + tl.arange(0, 32)[None, None, None, None, :]
    row = first + b * 8 + r
    inside = row < rows
    if K % BK != 0:
        inside = inside & (at < K)
    if IS_PAIRED:
        row = row // 2 + row % 2 * (rows // 2)
    return tl.load(source + row * STRIDE + at, mask=inside, other=0.0)


@triton.jit
def _weights(
    weight, step, N, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, S: tl.constexpr, IS_PAIRED: tl.constexpr
):  # fmt: skip
    """Return the tile of weight [N, K] that this program multiplies in a step of a phase; zeros after its last one."""
    STEPS: tl.constexpr = (K + BK - 1) // BK
    tile = tl.program_id(0) + step // STEPS * tl.num_programs(0)
    return _tile(weight, tile * BN, N, step % STEPS * BK, K, K, BN, BK, S, IS_PAIRED)


@triton.jit
def _first_two(
    weight, N, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, S: tl.constexpr, IS_PAIRED: tl.constexpr
):  # fmt: skip
    """Return the tiles of a phase's first two steps."""
    return _weights(weight, 0, N, K, BN, BK, S, IS_PAIRED), _weights(weight, 1, N, K, BN, BK, S, IS_PAIRED)


@triton.jit
def _product(
    w, v, x, weight, norm, add, out, M, eps, N: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, S: tl.constexpr, IS_NORMED: tl.constexpr, IS_GATED: tl.constexpr, ADDS: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    """Write the product of x [M, K], normed first or not, and weight [N, K]; with ADDS it is added to out.

    w, v: this program's first two tiles. The norm's factor of a row is that of its sums too.
    """
    STEPS: tl.constexpr = (K + BK - 1) // BK
    C: tl.constexpr = BK // 32 // S
    step = 0
    for tile in range(tl.program_id(0), (N + BN - 1) // BN, tl.num_programs(0)):
        sums = tl.zeros([S, 16, BN], tl.float32)
        squares = tl.zeros([R // 8, S, 8, 4], tl.float32)
        for part in range(STEPS):
            following = _weights(weight, step + 2, N, K, BN, BK, S, IS_GATED)
            a = _tile(x, 0, M, part * BK, K, K, R, BK, S, False)
            if IS_NORMED:
                values = a.to(tl.float32)
                each = tl.reshape(values * values, [R // 8, C, S, 8, 4, 8])
                squares += tl.sum(tl.sum(each, 5), 1)
                factors = _tile(norm, 0, 8, part * BK, 0, K, 8, BK, S, False).to(tl.float32)
                a = (values * factors).to(x.dtype.element_ty)
            if R == 8:  # an instruction has 16 rows
                a = tl.permute(tl.join(a, tl.zeros_like(a)), (0, 5, 1, 2, 3, 4))
            a = tl.permute(tl.reshape(a, [2, C, S, 8, 4, 2, 2, 2]), (2, 0, 3, 1, 5, 6, 4, 7))
            b = tl.permute(tl.reshape(w, [BN // 8, C, S, 8, 4, 2, 2, 2]), (2, 1, 5, 6, 4, 7, 0, 3))
            a, b = tl.reshape(a, [S, 16, BK // S]), tl.reshape(b, [S, BK // S, BN])
            sums = tl.dot(a.to(TYPE), b.to(TYPE), sums, input_precision="ieee")
            w, v = v, following
            step += 1
        row = tl.arange(0, R)[:, None]
        if R == 8:
            sums, _ = tl.split(tl.permute(tl.reshape(sums, [S, 2, 8, BN]), (0, 2, 3, 1)))
        found = tl.sum(sums, 0)
        if IS_NORMED:
            mean = tl.reshape(tl.sum(tl.sum(squares, 3), 1), [R]) / K
            found *= (1.0 / tl.sqrt(mean + eps))[:, None]
        WIDTH: tl.constexpr = N // 2 if IS_GATED else N
        BW: tl.constexpr = BN // 2 if IS_GATED else BN
        if IS_GATED:
            gate, up = tl.split(tl.reshape(found, [R, BW, 2]))
            found = gate / (1.0 + tl.exp(-gate)) * up
        column = (tile * BW + tl.arange(0, BW))[None, :]
        inside = (row < M) & (column < WIDTH)
        if ADDS:
            found += tl.load(add + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * WIDTH + column, found.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _arrive(counter, arrivals):
    """Count this program at the barrier, and return how many arrivals there are when all have come."""
    tl.debug_barrier()  # all threads have written before one of them counts the program
    tl.atomic_add(counter, 1, sem="release")
    return arrivals + tl.num_programs(0)


@triton.jit
def _wait(counter, arrivals):
    """Wait for so many arrivals; what programs wrote before theirs can be read then."""
    while tl.atomic_add(counter, 0, sem="acquire") < arrivals:
        pass


@triton.jit
def _turned(heads, at, norm, angles, live, eps, D: tl.constexpr):
    """Return heads [rows, D], which begin at heads + at, normed and rotated by angles, in float32."""
    d = tl.arange(0, D)
    is_second = d >= D // 2
    other = tl.where(is_second, d - D // 2, d + D // 2)
    values = tl.load(heads + at[:, None] + d[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    partners = tl.load(heads + at[:, None] + other[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 1) / D + eps)
    values = values * scale[:, None] * tl.load(norm + d).to(tl.float32)[None, :]
    partners = partners * scale[:, None] * tl.load(norm + other).to(tl.float32)[None, :]
    cosine, sine = tl.load(angles + d % (D // 2)), tl.load(angles + D // 2 + d % (D // 2))
    return values * cosine[None, :] + tl.where(is_second[None, :], partners, -partners) * sine[None, :]


@triton.jit
def _earlier(
    keys, values, item, tables, lengths, M, num_chunks, table_stride, block_stride, head_stride, slot_stride,
    KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return the keys and values of an item of attention that earlier steps have written, [CHUNK, D] each."""
    head, row, chunk = item % KV_HEADS, item // KV_HEADS % M, item // KV_HEADS // M
    length = tl.load(lengths + row, mask=chunk < num_chunks, other=0)
    t, d = chunk * CHUNK + tl.arange(0, CHUNK), tl.arange(0, D)
    read = t < length - 1
    block = tl.load(tables + row * table_stride + t // BLOCK, mask=read, other=0).to(tl.int64)
    at = (block * block_stride + head * head_stride + t % BLOCK * slot_stride)[:, None] + d[None, :]
    return tl.load(keys + at, mask=read[:, None], other=0.0), tl.load(values + at, mask=read[:, None], other=0.0)


@triton.jit
def _attend(
    k, v, item, qkv, q_norm, k_norm, keys, values, attended, parts, peaks, arrived, positions, slots, lengths, angles,
    M, num_chunks, block_stride, head_stride, slot_stride, eps, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    """Attend with the queries of a row that share a head of keys, to one chunk; the last to arrive merges chunks.

    k, v: what `_earlier` returns. The newest chunk's program writes the new key and value to the cache. Chunks behind
    the end write nothing.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    head, row, chunk = item % KV_HEADS, item // KV_HEADS % M, item // KV_HEADS // M
    length, one = tl.load(lengths + row), tl.arange(0, 1)
    chunks = (length + CHUNK - 1) // CHUNK
    if RETURNS:  # noqa: SIM102 - known to the compiler, which does not see the return otherwise
        if chunk >= chunks:
            return
    d, g = tl.arange(0, D), tl.arange(0, ROWS)
    live = g < GROUP
    angles += tl.load(positions + row) * D
    own = qkv + row * (HEADS + 2 * KV_HEADS) * D
    q = _turned(own, (head * GROUP + g) * D, q_norm, angles, live, eps, D).to(qkv.dtype.element_ty)
    new_at = (HEADS + head + one) * D
    new_k = _turned(own, new_at, k_norm, angles, one == 0, eps, D).to(k.dtype)
    new_v = tl.load(own + (new_at + KV_HEADS * D)[:, None] + d[None, :]).to(v.dtype)
    if chunk == chunks - 1:
        slot = tl.load(slots + row)
        at = slot // BLOCK * block_stride + head * head_stride + slot % BLOCK * slot_stride + d[None, :]
        tl.store(keys + at, new_k)
        tl.store(values + at, new_v)
    t = chunk * CHUNK + tl.arange(0, CHUNK)
    is_new = (t == length - 1)[:, None]
    k, v = tl.where(is_new, new_k, k), tl.where(is_new, new_v, v)
    s = tl.dot(q.to(TYPE), tl.trans(k.to(TYPE)), input_precision="ieee") * (scale * LOG2_E)
    s = tl.where((t < length)[None, :], s, UNSEEN)
    peak = tl.max(s, 1)
    p = tl.exp2(s - peak[:, None])
    total = tl.sum(p, 1)
    sums = tl.dot(p.to(TYPE), v.to(TYPE), input_precision="ieee")
    is_last = (chunk == 0) & (chunks == 1)
    if (chunk < chunks) & (chunks > 1):
        of_head = (row * KV_HEADS + head) * num_chunks
        at, at_sums = g * 2, g[:, None] * D + d[None, :]
        tl.store(peaks + (of_head + chunk) * ROWS * 2 + at, peak, mask=live)
        tl.store(peaks + (of_head + chunk) * ROWS * 2 + at + 1, total, mask=live)
        tl.store(parts + (of_head + chunk) * ROWS * D + at_sums, sums, mask=live[:, None])
        tl.debug_barrier()
        is_last = tl.atomic_add(arrived + row * KV_HEADS + head, 1, sem="acq_rel") == chunks - 1
        if is_last:
            tl.store(arrived + row * KV_HEADS + head, 0)
        peak, total, sums = tl.full([ROWS], UNSEEN, tl.float32), tl.zeros([ROWS], tl.float32), sums * 0.0
        for number in range(tl.where(is_last, chunks, 0)):
            found = tl.load(peaks + (of_head + number) * ROWS * 2 + at, mask=live, other=0.0)
            weight = tl.load(peaks + (of_head + number) * ROWS * 2 + at + 1, mask=live, other=0.0)
            part = tl.load(parts + (of_head + number) * ROWS * D + at_sums, mask=live[:, None], other=0.0)
            higher = tl.maximum(peak, found)
            kept, added = tl.exp2(peak - higher), tl.exp2(found - higher)
            peak, total = higher, total * kept + weight * added
            sums = sums * kept[:, None] + part * added[:, None]
    written = g < tl.where(is_last, GROUP, 0)
    result = sums / tl.where(written, total, 1.0)[:, None]
    out = attended + (row * HEADS + head * GROUP + g)[:, None] * D + d[None, :]
    tl.store(out, result.to(attended.dtype.element_ty), mask=written[:, None])


@triton.jit(do_not_specialize=["M", "num_chunks", "first_layer", "last_layer", "table_stride"])
def decode(
    layers, hidden, middle, qkv, attended, inner, parts, peaks, counters, positions, slots, lengths, tables, angles,
    M, num_chunks, first_layer, last_layer, table_stride, block_stride, head_stride, slot_stride, eps, scale,
    HIDDEN: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, INNER: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, R: tl.constexpr, S: tl.constexpr, BK: tl.constexpr, QKV_N: tl.constexpr,
    OUT_N: tl.constexpr, GATED_N: tl.constexpr, DOWN_N: tl.constexpr, PHASE: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Replace hidden [M, HIDDEN] by what the layers [first_layer, last_layer) make of it, and fill their caches.

    layers: int64 [layers, COLUMNS]. counters: int32, 0 before and after: of the barrier, of programs that end, and of
    chunks [M, KV_HEADS]. R: 8 or 16 rows, M or more. PHASE: ALL, or one phase, which needs no barrier.
    """
    PLAIN: tl.constexpr = hidden.dtype.element_ty
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * DIM
    Q_WIDTH: tl.constexpr = HEADS * DIM
    IS_WHOLE: tl.constexpr = PHASE == ALL
    program, programs = tl.program_id(0), tl.num_programs(0)
    arrivals = 0
    qkv_weight = _pointer(layers, first_layer, 1, PLAIN)
    if IS_WHOLE or PHASE == QKV:
        w, v = _first_two(qkv_weight, WIDTH, HIDDEN, QKV_N, BK, S, False)
    for layer in range(first_layer, last_layer):
        # a phase's pointers are read before the barrier in front of the one before it
        out_weight = _pointer(layers, layer, 4, PLAIN)
        keys, values = _pointer(layers, layer, 8, PLAIN), _pointer(layers, layer, 9, PLAIN)
        if IS_WHOLE or PHASE == QKV:
            norm = _pointer(layers, layer, 0, PLAIN)
            _product(
                w, v, hidden, qkv_weight, norm, hidden, qkv, M, eps,
                WIDTH, HIDDEN, R, QKV_N, BK, S, True, False, False, TYPE,
            )  # fmt: skip
        if IS_WHOLE:
            arrivals = _arrive(counters, arrivals)
        if IS_WHOLE or PHASE == OUT:
            o, p = _first_two(out_weight, HIDDEN, Q_WIDTH, OUT_N, BK, S, False)
        if IS_WHOLE or PHASE == ATTENTION:
            k, new = _earlier(
                keys, values, program, tables, lengths, M, num_chunks, table_stride, block_stride, head_stride,
                slot_stride, KV_HEADS, DIM, BLOCK, CHUNK,
            )  # fmt: skip
        q_norm, k_norm = _pointer(layers, layer, 2, PLAIN), _pointer(layers, layer, 3, PLAIN)
        gated_weight = _pointer(layers, layer, 6, PLAIN)
        if IS_WHOLE:
            _wait(counters, arrivals)
        if IS_WHOLE or PHASE == ATTENTION:
            for item in range(program, M * KV_HEADS * num_chunks, programs):
                next_k, next_new = _earlier(
                    keys, values, item + programs, tables, lengths, M, num_chunks, table_stride, block_stride,
                    head_stride, slot_stride, KV_HEADS, DIM, BLOCK, CHUNK,
                )  # fmt: skip
                _attend(
                    k, new, item, qkv, q_norm, k_norm, keys, values, attended, parts, peaks, counters + 2, positions,
                    slots, lengths, angles, M, num_chunks, block_stride, head_stride, slot_stride, eps, scale,
                    HEADS, KV_HEADS, DIM, BLOCK, CHUNK, TYPE,
                )  # fmt: skip
                k, new = next_k, next_new
        if IS_WHOLE:
            arrivals = _arrive(counters, arrivals)
            _wait(counters, arrivals)
        if IS_WHOLE or PHASE == OUT:
            _product(
                o, p, attended, out_weight, out_weight, hidden, middle, M, eps,
                HIDDEN, Q_WIDTH, R, OUT_N, BK, S, False, False, True, TYPE,
            )  # fmt: skip
        if IS_WHOLE:
            arrivals = _arrive(counters, arrivals)
        if IS_WHOLE or PHASE == GATED:
            o, p = _first_two(gated_weight, 2 * INNER, HIDDEN, GATED_N, BK, S, True)
        norm, down_weight = _pointer(layers, layer, 5, PLAIN), _pointer(layers, layer, 7, PLAIN)
        if IS_WHOLE:
            _wait(counters, arrivals)
        if IS_WHOLE or PHASE == GATED:
            _product(
                o, p, middle, gated_weight, norm, middle, inner, M, eps,
                2 * INNER, HIDDEN, R, GATED_N, BK, S, True, True, False, TYPE,
            )  # fmt: skip
        if IS_WHOLE:
            arrivals = _arrive(counters, arrivals)
        if IS_WHOLE or PHASE == DOWN:
            o, p = _first_two(down_weight, HIDDEN, INNER, DOWN_N, BK, S, False)
        qkv_weight = _pointer(layers, tl.minimum(layer + 1, last_layer - 1), 1, PLAIN)
        if IS_WHOLE:
            _wait(counters, arrivals)
        if IS_WHOLE or PHASE == DOWN:
            _product(
                o, p, inner, down_weight, down_weight, middle, hidden, M, eps,
                HIDDEN, INNER, R, DOWN_N, BK, S, False, False, True, TYPE,
            )  # fmt: skip
        if IS_WHOLE:
            arrivals = _arrive(counters, arrivals)
            w, v = _first_two(
                qkv_weight, tl.where(layer + 1 < last_layer, WIDTH, 0), HIDDEN, QKV_N, BK, S, False
            )  # fmt: skip
            if layer + 1 < last_layer:
                _wait(counters, arrivals)
    if IS_WHOLE:  # noqa: SIM102 - the last program to end leaves the counters as it found them
        if tl.atomic_add(counters + 1, 1, sem="acq_rel") == programs - 1:
            tl.store(counters, 0)
            tl.store(counters + 1, 0)
