"""Functions of rows, in Triton: norms, activations and the rotation of heads. A row has one program, so that its bits
do not depend on the others."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    x, residual, weight, total, out, token_stride, head_stride, eps, offset,
    HEADS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Write the norm of a row of x [tokens, heads, dim]; with ADDS of x + residual, which is written to total."""
    row = tl.program_id(0)
    d = tl.arange(0, D)
    here = d < DIM
    start = (row // HEADS).to(tl.int64) * token_stride + (row % HEADS) * head_stride
    values = tl.load(x + start + d, mask=here, other=0.0).to(tl.float32)
    place = row.to(tl.int64) * DIM + d
    if ADDS:
        values += tl.load(residual + place, mask=here, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=here)
        values = rounded.to(tl.float32)
    factors = tl.load(weight + d, mask=here, other=0.0).to(tl.float32) + offset
    mean = tl.sum(values * values, 0) / DIM
    normed = values * (1.0 / tl.sqrt(mean + eps)) * factors
    tl.store(out + place, normed.to(out.dtype.element_ty), mask=here)


@triton.jit
def silu_and_mul(x, out, dim, BLOCK: tl.constexpr):
    """Write `silu(gate) * up` for a block of a row of x [tokens, 2 · dim]."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = d < dim
    gate = tl.load(x + row * 2 * dim + d, mask=here, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * dim + dim + d, mask=here, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * dim + d, result.to(out.dtype.element_ty), mask=here)


@triton.jit
def rotary(
    x, out, positions, table, weight, token_stride, head_stride, eps, offset,
    HEADS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Write a head of x [tokens, heads, dim], normed first with HAS_NORM, rotated by its position.

    table: float32 [positions, 2 · HALF], cosines beside sines; elements behind the first 2 · HALF stay.
    """
    row = tl.program_id(0)
    token, head = (row // HEADS).to(tl.int64), row % HEADS
    d = tl.arange(0, D)
    here = d < DIM
    source = x + token * token_stride + head * head_stride
    if INTERLEAVED:
        pair, is_second = d // 2, d % 2 == 1
        other = tl.where(is_second, d - 1, d + 1)
    else:
        pair, is_second = d % HALF, d >= HALF
        other = tl.where(is_second, d - HALF, d + HALF)
    turns = d < 2 * HALF
    values = tl.load(source + d, mask=here, other=0.0).to(tl.float32)
    partners = tl.load(source + other, mask=turns, other=0.0).to(tl.float32)
    if HAS_NORM:
        mean = tl.sum(values * values, 0) / DIM
        scale = 1.0 / tl.sqrt(mean + eps)
        values = values * scale * (tl.load(weight + d, mask=here, other=0.0).to(tl.float32) + offset)
        partners = partners * scale * (tl.load(weight + other, mask=turns, other=0.0).to(tl.float32) + offset)
    angle = table + tl.load(positions + token) * 2 * HALF + pair
    cosine = tl.load(angle, mask=turns, other=1.0)
    sine = tl.load(angle + HALF, mask=turns, other=0.0)
    turned = values * cosine + tl.where(is_second, partners, -partners) * sine
    tl.store(out + row.to(tl.int64) * DIM + d, tl.where(turns, turned, values).to(out.dtype.element_ty), mask=here)
