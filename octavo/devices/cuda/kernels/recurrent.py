"""Recurrences over the tokens of a sequence, and the norm behind them, in Triton; `octavo.ops.recurrent` says what is
right.

A program takes the tokens of its row one after the other, or has no sums over them, and states are float32: a cut of a
prompt changes no bit. Which blocks hold the states of a row is read on the device; a token whose slot lies in block 0
leaves none.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.devices.cuda.kernels.elementwise import sigmoid, softplus


@triton.jit
def _row(starts, lengths, tables, table_stride, BLOCK: tl.constexpr):
    """Return of the program's row: its first token among all, its tokens, those before them, and their last block."""
    row = tl.program_id(0)
    first = tl.load(starts + row)
    count = tl.load(starts + row + 1) - first
    context = tl.load(lengths + row) - count
    block = tl.load(tables + row * table_stride + tl.maximum(context - 1, 0) // BLOCK)
    return first, count, context, block.to(tl.int64)


@triton.jit
def _inputs(
    x, before, state, first, count, context, at, channel, channels, x_stride, before_stride,
    TAPS: tl.constexpr, IS_GATED: tl.constexpr,
):  # fmt: skip
    """Return the inputs [tokens, channels] of the tokens `at` of a row; those below 0 are in its state."""
    inside = (channel < channels)[None, :]
    is_here = (at < count)[:, None] & (at >= 0)[:, None] & inside
    token = (first + at).to(tl.int64)[:, None]
    found = tl.load(x + token * x_stride + channel[None, :], mask=is_here, other=0.0).to(tl.float32)
    if IS_GATED:
        found *= tl.load(before + token * before_stride + channel[None, :], mask=is_here, other=0.0).to(tl.float32)
    is_kept = (at < 0)[:, None] & (at + context >= 0)[:, None] & inside
    kept = tl.load(state + (at + TAPS - 1)[:, None] * channels + channel[None, :], mask=is_kept, other=0.0)
    return tl.where(is_here, found, kept)


@triton.jit(do_not_specialize=["table_stride"])
def short_convolution(
    x, before, after, weight, bias, out, states, starts, lengths, tables, slots,
    x_stride, before_stride, after_stride, block_stride, table_stride, channels,
    TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, IS_GATED: tl.constexpr, BLOCK: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write the convolution of a tile of BT tokens and BC channels of a row; the first tile writes the row's states.

    Only the first tile may reach back to the state that the row begins with.
    """
    first, count, context, block = _row(starts, lengths, tables, table_stride, BLOCK)
    begin = tl.program_id(2) * BT
    if begin >= count:
        return
    at = begin + tl.arange(0, BT)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = channel < channels
    state = states + block * block_stride
    total = tl.zeros([BT, BC], tl.float32)
    for tap in tl.static_range(TAPS):
        factors = tl.load(weight + tap * channels + channel, mask=inside, other=0.0).to(tl.float32)
        total += factors[None, :] * _inputs(
            x, before, state, first, count, context, at - (TAPS - 1 - tap), channel, channels, x_stride, before_stride,
            TAPS, IS_GATED,
        )  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    token, written = (first + at).to(tl.int64)[:, None], (at < count)[:, None] & inside[None, :]
    if IS_GATED:
        total *= tl.load(after + token * after_stride + channel[None, :], mask=written, other=0.0).to(tl.float32)
    else:
        total = total / (1.0 + tl.exp(-total))
    tl.store(out + token * channels + channel[None, :], total.to(out.dtype.element_ty), mask=written)
    if begin > 0:
        return
    T: tl.constexpr = triton.next_power_of_2(TAPS - 1)
    kept = tl.arange(0, T)
    stored = (kept < TAPS - 1)[:, None] & inside[None, :]
    last = context + count - 1
    for number in range(last // BLOCK - context // BLOCK + 1):
        # from the last block on: the first one may be that of the state which the row begins with
        end = tl.minimum((last // BLOCK - number + 1) * BLOCK - 1, last) - context
        target = tl.load(slots + first + end) // BLOCK
        if target > 0:
            inputs = _inputs(
                x, before, state, first, count, context, end - (TAPS - 2) + kept, channel, channels, x_stride,
                before_stride, TAPS, IS_GATED,
            )  # fmt: skip
            tl.debug_barrier()  # all threads have read the state before one of them writes to its block
            tl.store(states + target * block_stride + kept[:, None] * channels + channel[None, :], inputs, mask=stored)


@triton.jit(do_not_specialize=["table_stride", "repeats"])
def recurrence(
    query, key, value, step, beta, decay_log, step_bias, skip, out, states, starts, lengths, tables, slots,
    query_stride, key_stride, value_stride, step_stride, beta_stride, out_stride, block_stride, table_stride,
    repeats, least, most,
    DIM: tl.constexpr, D: tl.constexpr, VALUE: tl.constexpr, BV: tl.constexpr, BLOCK: tl.constexpr,
    IS_DELTA: tl.constexpr, HAS_FACTORS: tl.constexpr, DECAYS_BY_KEY: tl.constexpr, IS_BOUNDED: tl.constexpr,
    IS_SELECTIVE: tl.constexpr,
):  # fmt: skip
    """Go through the tokens of a row with BV columns of a head's matrix: the gated delta rule, or a scan of Mamba's.

    repeats: heads that share a head of keys and queries. skip: of the delta rule its factors, where it has some.
    IS_BOUNDED: decays of rows are those of `bounded_delta_rule`.
    IS_SELECTIVE: the scan is the first Mamba's, with a step, a bias and a skip for each column, and in the place of
    decay_log the rate of each element of the state.
    """
    first, count, context, block = _row(starts, lengths, tables, table_stride, BLOCK)
    head = tl.program_id(1)
    d, column = tl.arange(0, D), tl.program_id(2) * BV + tl.arange(0, BV)
    of_key, of_value = d < DIM, column < VALUE
    inside = of_key[:, None] & of_value[None, :]
    own = states + (head * DIM + d)[:, None] * VALUE + column[None, :]
    state = tl.zeros([D, BV], tl.float32)
    if context > 0:
        state = tl.load(own + block * block_stride, mask=inside, other=0.0)
    if IS_SELECTIVE:
        rate = tl.load(decay_log + d[:, None] * VALUE + column[None, :], mask=inside, other=0.0)
        bias = tl.load(step_bias + column, mask=of_value, other=0.0)
        skipped = tl.load(skip + column, mask=of_value, other=0.0)
    else:
        rate = tl.exp(tl.load(decay_log + head))
        skipped = tl.load(skip + head)
    if DECAYS_BY_KEY:
        bias = tl.load(step_bias + head * DIM + d, mask=of_key, other=0.0)
    elif not IS_SELECTIVE:
        bias = tl.load(step_bias + head)
    shared = head // repeats * DIM + d
    for done in range(count):
        token = (first + done).to(tl.int64)
        q = tl.load(query + token * query_stride + shared, mask=of_key, other=0.0).to(tl.float32)
        k = tl.load(key + token * key_stride + shared, mask=of_key, other=0.0).to(tl.float32)
        v = tl.load(value + token * value_stride + head * VALUE + column, mask=of_value, other=0.0).to(tl.float32)
        if DECAYS_BY_KEY:
            raw = tl.load(step + token * step_stride + head * DIM + d, mask=of_key, other=0.0).to(tl.float32)
        elif IS_SELECTIVE:
            raw = tl.load(step + token * step_stride + column, mask=of_value, other=0.0).to(tl.float32)
        else:
            raw = tl.load(step + token * step_stride + head).to(tl.float32)
        if IS_BOUNDED:
            decay = tl.exp(-most * sigmoid(rate * (raw + bias)))
        else:
            dt = tl.minimum(tl.maximum(softplus(raw + bias), least), most)
            decay = tl.exp(-rate * (dt[None, :] if IS_SELECTIVE else dt))
        state = state * (decay[:, None] if DECAYS_BY_KEY else decay)
        if IS_DELTA:
            q = q * (1.0 / tl.sqrt(tl.sum(q * q, 0) + 1e-6)) * (DIM**-0.5)
            k = k * (1.0 / tl.sqrt(tl.sum(k * k, 0) + 1e-6))
            factor = sigmoid(tl.load(beta + token * beta_stride + head).to(tl.float32))
            if HAS_FACTORS:
                factor *= skipped
            change = (v - tl.sum(state * k[:, None], 0)) * factor
        else:
            change = v * dt
        state += k[:, None] * change[None, :]
        found = tl.sum(state * q[:, None], 0)
        if not IS_DELTA:
            found += v * skipped
        place = token * out_stride + head * VALUE + column
        tl.store(out + place, found.to(out.dtype.element_ty), mask=of_value)
        if (done + 1 == count) | ((context + done + 1) % BLOCK == 0):
            target = tl.load(slots + token) // BLOCK
            if target > 0:
                tl.store(own + target * block_stride, state, mask=inside)


@triton.jit
def gated_rms_norm(
    x, gate, weight, out, x_stride, gate_stride, out_stride, eps,
    GROUP: tl.constexpr, D: tl.constexpr, HAS_ONE_WEIGHT: tl.constexpr, IS_GATE_FIRST: tl.constexpr,
):  # fmt: skip
    """Write the norm of a group of a row beside its gate, or behind it. HAS_ONE_WEIGHT: that of every group."""
    token, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUP
    d = tl.arange(0, D)
    here = d < GROUP
    values = tl.load(x + token * x_stride + start + d, mask=here, other=0.0).to(tl.float32)
    opened = tl.load(gate + token * gate_stride + start + d, mask=here, other=0.0).to(tl.float32)
    opened = opened / (1.0 + tl.exp(-opened))
    if IS_GATE_FIRST:
        values *= opened
    factors = tl.load(weight + (0 if HAS_ONE_WEIGHT else start) + d, mask=here, other=0.0).to(tl.float32)
    normed = values * (1.0 / tl.sqrt(tl.sum(values * values, 0) / GROUP + eps)) * factors
    if not IS_GATE_FIRST:
        normed *= opened
    tl.store(out + token * out_stride + start + d, normed.to(out.dtype.element_ty), mask=here)
