"""Functions of single elements, in Triton: computed in float32 and rounded once."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.devices.cuda.kernels.dependent import wait_for_earlier

ALL = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def elementwise(
    x, y, out, dim, x_stride, y_stride, first, second, FUNCTION: tl.constexpr, BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """Write the operator FUNCTION of a block of a row of x and y [tokens, dim], and of two numbers, to out."""
    wait_for_earlier(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = d < dim
    a = tl.load(x + row * x_stride + d, mask=here, other=0.0).to(tl.float32)
    b = tl.load(y + row * y_stride + d, mask=here, other=0.0).to(tl.float32)
    if FUNCTION == "silu_and_mul":
        result = a / (1.0 + tl.exp(-a)) * b
    elif FUNCTION == "gelu_tanh_and_mul":  # (1 + tanh(z)) / 2 is sigmoid(2 · z)
        result = a * sigmoid(1.5957691216057308 * (a + 0.044715 * a * a * a)) * b
    elif FUNCTION == "clamped_swiglu":
        gate = tl.minimum(a, second, propagate_nan=ALL)
        up = tl.minimum(tl.maximum(b, -second, propagate_nan=ALL), second, propagate_nan=ALL)
        result = gate * sigmoid(gate * first) * (up + 1.0)
    elif FUNCTION == "gated_by_sigmoid":
        result = a * sigmoid(b)
    elif FUNCTION == "gated_by_softplus":
        result = a * softplus(b)
    else:
        tl.static_assert(FUNCTION == "soft_capped")
        result = first * _tanh(a / first)
    tl.store(out + row * dim + d, result.to(out.dtype.element_ty), mask=here)


@triton.jit
def _tanh(x):
    """Return tanh(x), by its series where one minus the exponential would have few digits."""
    square, small = x * x, tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - small) / (1.0 + small)
    near = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.1, near, tl.where(x < 0.0, -far, far))


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x)), with an exponential that does not overflow."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x < 0.0, small, 1.0) / (1.0 + small)


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), which is x from 20 on."""
    grown = tl.exp(tl.minimum(x, 20.0))
    above = 1.0 + grown
    # log(1 + grown), whose rounding error in 1 + grown cancels
    soft = tl.where(above == 1.0, grown, tl.log(above) * (grown / tl.where(above == 1.0, 1.0, above - 1.0)))
    return tl.where(x > 20.0, x, soft)


@triton.jit
def rounded(x):
    """Return the nearest whole number, the even one of two, of less than 2²² in magnitude."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def factors(codes, TYPE: tl.constexpr):
    """Return the 256th part of what codes of floats of 8 bits (E4M3) stand for: its bits are those of a float16, and no
    instructions are needed that only some GPUs have."""
    wide = codes.to(tl.int16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True).to(TYPE)
