"""Functions of single elements: activations, addition and factors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from octavo.devices.cpu.runtime import FLOAT_TYPES, TYPE_CODES, CpuRuntime, lacks, rows_of
from octavo.ops import elementwise
from octavo.ops.registry import Implementation

_RELU, _GELU, _GELU_TANH, _SILU_AND_MUL, _ADD, _GELU_TANH_AND_MUL, _SCALED, _SOFT_CAPPED, _RELU2 = range(9)
_GATED_BY_SIGMOID, _CLAMPED_SWIGLU = 9, 10
_MULTIPLIED, _XIELU, _CLAMPED, _GATED_BY_SOFTPLUS = 11, 12, 13, 14


def make_function(function: int, reference: Callable[..., Tensor], runtime: CpuRuntime) -> Callable[..., Tensor]:
    """Return a function of one tensor and perhaps a parameter, by the library's number.

    Types other than float32 and bfloat16 are left to `reference`.
    """
    kernel, empty = runtime.cpu.elementwise, runtime.empty

    def compute(x: Tensor, *parameter: float) -> Tensor:
        dtype = x.dtype
        if dtype not in FLOAT_TYPES:
            return reference(x, *parameter)
        out = empty(x.shape, dtype)
        count, width, stride = rows_of(x)
        kernel(
            *(function, x.data_ptr(), 0, out.data_ptr(), count, stride, 0, width, TYPE_CODES[dtype]),
            *(parameter or (0.0,)),
        )
        return out

    return compute


def make_gated(function: int, reference: Callable[..., Tensor], runtime: CpuRuntime) -> Callable[..., Tensor]:
    """Return a function of x whose halves are a gate and the other factor, by the library's number."""
    kernel, empty = runtime.cpu.elementwise, runtime.empty

    def compute(x: Tensor, *parameters: float) -> Tensor:
        dtype = x.dtype
        if dtype not in FLOAT_TYPES:
            return reference(x, *parameters)
        count, both, stride = rows_of(x)
        width = both // 2
        out = empty((*x.shape[:-1], width), dtype)
        gate = x.data_ptr()
        up = gate + width * dtype.itemsize
        kernel(
            function, gate, up, out.data_ptr(), count, stride, stride, width, TYPE_CODES[dtype], *(parameters or (0.0,))
        )
        return out

    return compute


def make_of_two(
    function: int, reference: Callable[..., Tensor], runtime: CpuRuntime
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return function number `function` of two tensors; the second may be one row for all, or xIELU's factors."""
    kernel, empty = runtime.cpu.elementwise, runtime.empty

    def compute(x: Tensor, y: Tensor) -> Tensor:
        dtype, shape = x.dtype, x.shape
        if dtype not in FLOAT_TYPES or y.dtype is not dtype:
            return reference(x, y)
        fits = y.shape in (shape, shape[-1:]) or function == _XIELU
        assert fits, f"{tuple(y.shape)} does not go with {tuple(shape)}"
        out = empty(shape, dtype)
        count, width, stride = rows_of(x)
        y_stride = rows_of(y)[2] if y.dim() > 1 else 0
        kernel(
            *(function, x.data_ptr(), y.data_ptr(), out.data_ptr()),
            *(count, stride, y_stride, width, TYPE_CODES[dtype], 0.0),
        )
        return out

    return compute


def make_widened(runtime: CpuRuntime) -> Callable[[Tensor, int], Tensor]:
    """Make `octavo.ops.elementwise.widened`, of any type."""
    kernel, empty = runtime.cpu.widened, runtime.empty

    def widened(x: Tensor, dim: int) -> Tensor:
        tokens, heads, own = x.shape
        assert x.stride()[1:] == (own, 1), "the heads of a token lie side by side"
        size, out = x.element_size(), empty((tokens, heads, dim), x.dtype)
        kernel(x.data_ptr(), x.stride(0) * size, out.data_ptr(), tokens, heads, own * size, dim * size)
        return out

    return widened


IMPLEMENTATIONS = (
    *(
        Implementation(function.__name__, "native", partial(make, number, function))
        for make, number, function in (
            (make_function, _RELU, elementwise.relu),
            (make_function, _RELU2, elementwise.relu2),
            (make_function, _GELU, elementwise.gelu),
            (make_function, _GELU_TANH, elementwise.gelu_tanh),
            (make_function, _SCALED, elementwise.scaled),
            (make_function, _CLAMPED, elementwise.clamped),
            (make_function, _SOFT_CAPPED, elementwise.soft_capped),
            (make_gated, _SILU_AND_MUL, elementwise.silu_and_mul),
            (make_gated, _GELU_TANH_AND_MUL, elementwise.gelu_tanh_and_mul),
            (make_gated, _CLAMPED_SWIGLU, elementwise.clamped_swiglu),
            (make_of_two, _ADD, elementwise.add),
            (make_of_two, _GATED_BY_SIGMOID, elementwise.gated_by_sigmoid),
            (make_of_two, _GATED_BY_SOFTPLUS, elementwise.gated_by_softplus),
            (make_of_two, _SILU_AND_MUL, elementwise.silu_times),
            (make_of_two, _MULTIPLIED, elementwise.multiplied),
            (make_of_two, _XIELU, elementwise.xielu),
        )
    ),
    Implementation("widened", "native", make_widened, lacks("widened")),
)
