"""Functions of rows, in Triton: norms and the rotation of heads. A row has one program, so that its bits
do not depend on the others."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.devices.cuda.kernels.dependent import wait_for_earlier


@triton.jit
def rms_norm(
    x, residual, weight, total, out, token_stride, head_stride, eps, offset,
    HEADS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, ADDS: tl.constexpr, IS_DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Write the norm of a row of x [tokens, heads, dim]; with ADDS of x + residual, which is written to total."""
    row = tl.program_id(0)
    d = tl.arange(0, D)
    here = d < DIM
    factors = tl.load(weight + d, mask=here, other=0.0).to(tl.float32) + offset
    wait_for_earlier(IS_DEPENDENT)
    start = (row // HEADS).to(tl.int64) * token_stride + (row % HEADS) * head_stride
    values = tl.load(x + start + d, mask=here, other=0.0).to(tl.float32)
    place = row.to(tl.int64) * DIM + d
    if ADDS:
        values += tl.load(residual + place, mask=here, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=here)
        values = rounded.to(tl.float32)
    mean = tl.sum(values * values, 0) / DIM
    normed = values * (1.0 / tl.sqrt(mean + eps)) * factors
    tl.store(out + place, normed.to(out.dtype.element_ty), mask=here)


@triton.jit
def _turned(
    x, position, table, weight, eps, offset,
    DIM: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Return the head x [DIM], normed first with HAS_NORM, rotated by its position, in float32.

    table: float32 [positions, 2 · HALF], cosines beside sines; elements behind the first 2 · HALF stay.
    """
    d = tl.arange(0, D)
    here = d < DIM
    if INTERLEAVED:
        pair, is_second = d // 2, d % 2 == 1
        other = tl.where(is_second, d - 1, d + 1)
    else:
        pair, is_second = d % HALF, d >= HALF
        other = tl.where(is_second, d - HALF, d + HALF)
    turns = d < 2 * HALF
    values = tl.load(x + d, mask=here, other=0.0).to(tl.float32)
    partners = tl.load(x + other, mask=turns, other=0.0).to(tl.float32)
    if HAS_NORM:
        mean = tl.sum(values * values, 0) / DIM
        scale = 1.0 / tl.sqrt(mean + eps)
        values = values * scale * (tl.load(weight + d, mask=here, other=0.0).to(tl.float32) + offset)
        partners = partners * scale * (tl.load(weight + other, mask=turns, other=0.0).to(tl.float32) + offset)
    angle = table + position * 2 * HALF + pair
    cosine = tl.load(angle, mask=turns, other=1.0)
    sine = tl.load(angle + HALF, mask=turns, other=0.0)
    turned = values * cosine + tl.where(is_second, partners, -partners) * sine
    return tl.where(turns, turned, values)


@triton.jit
def rotate_and_store(
    q, k, v, q_out, keys, values, slots, positions, q_table, k_table, q_weight, k_weight,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    block_stride, cache_head_stride, slot_stride, eps, offset,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_NORM: tl.constexpr, HAS_SLOTS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Write a head of q rotated, or one of k, rotated, or of v to its slot in the planes `keys` and `values`; without
    HAS_SLOTS token i has slot i."""
    wait_for_earlier(IS_DEPENDENT)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + token)
    slot = tl.load(slots + token) if HAS_SLOTS else token
    d = tl.arange(0, D)
    here = d < DIM
    place = (slot // BLOCK) * block_stride + (slot % BLOCK) * slot_stride + d
    if head < HEADS:
        source = q + token * q_token_stride + head * q_head_stride
        turned = _turned(source, position, q_table, q_weight, eps, offset, DIM, D, HALF, INTERLEAVED, HAS_NORM)
        tl.store(q_out + (token * HEADS + head) * DIM + d, turned.to(q_out.dtype.element_ty), mask=here)
    elif head < HEADS + KV_HEADS:
        head -= HEADS
        source = k + token * k_token_stride + head * k_head_stride
        turned = _turned(source, position, k_table, k_weight, eps, offset, DIM, D, HALF, INTERLEAVED, HAS_NORM)
        rounded = turned.to(k.dtype.element_ty)  # as it is without a cache, which may have another type
        tl.store(keys + place + head * cache_head_stride, rounded.to(keys.dtype.element_ty), mask=here)
    else:
        head -= HEADS + KV_HEADS
        value = tl.load(v + token * v_token_stride + head * v_head_stride + d, mask=here)
        tl.store(values + place + head * cache_head_stride, value.to(values.dtype.element_ty), mask=here)
