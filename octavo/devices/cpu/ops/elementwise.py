"""Functions of single elements: activations, and elementwise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from octavo.devices.cpu.runtime import TYPE_CODES, CpuRuntime, dense, rows_of
from octavo.ops import elementwise
from octavo.ops.registry import Implementation

_TYPES = (torch.float32, torch.bfloat16)
_RELU, _GELU, _GELU_TANH, _SILU_AND_MUL, _ADD = range(5)


def make_activation(function: int, reference: Callable[[Tensor], Tensor], runtime: CpuRuntime) -> Callable[..., Tensor]:
    """Return a function of one tensor, by the library's number; types but float32 and bfloat16 by `reference`."""
    kernel, empty = runtime.cpu.elementwise, runtime.empty

    def activate(x: Tensor) -> Tensor:
        dtype = x.dtype
        if dtype not in _TYPES:
            return reference(x)
        out = empty(x.shape, dtype)
        count, width, stride = rows_of(x)
        kernel(function, x.data_ptr(), 0, out.data_ptr(), count, stride, 0, width, TYPE_CODES[dtype])
        return out

    return activate


def make_silu_and_mul(runtime: CpuRuntime) -> Callable[[Tensor], Tensor]:
    """Make `octavo.ops.elementwise.silu_and_mul` likewise."""
    kernel, empty = runtime.cpu.elementwise, runtime.empty

    def silu_and_mul(x: Tensor) -> Tensor:
        dtype = x.dtype
        if dtype not in _TYPES:
            return elementwise.silu_and_mul(x)
        count, both, stride = rows_of(x)
        width = both // 2
        out = empty((*x.shape[:-1], width), dtype)
        gate = x.data_ptr()
        up = gate + width * dtype.itemsize
        kernel(_SILU_AND_MUL, gate, up, out.data_ptr(), count, stride, stride, width, TYPE_CODES[dtype])
        return out

    return silu_and_mul


def make_add(runtime: CpuRuntime) -> Callable[[Tensor, Tensor], Tensor]:
    """Make `octavo.ops.elementwise.add` likewise."""
    kernel, empty = runtime.cpu.elementwise, runtime.empty

    def add(x: Tensor, y: Tensor) -> Tensor:
        dtype, shape = x.dtype, x.shape
        if dtype not in _TYPES or y.dtype is not dtype:
            return elementwise.add(x, y)
        assert y.shape == shape, f"cannot add {tuple(y.shape)} to {tuple(shape)}"
        out, y = empty(shape, dtype), dense(y)
        count, width, stride = rows_of(x)
        kernel(_ADD, x.data_ptr(), y.data_ptr(), out.data_ptr(), count, stride, width, width, TYPE_CODES[dtype])
        return out

    return add


IMPLEMENTATIONS = (
    Implementation("relu", "native", partial(make_activation, _RELU, elementwise.relu)),
    Implementation("gelu", "native", partial(make_activation, _GELU, elementwise.gelu)),
    Implementation("gelu_tanh", "native", partial(make_activation, _GELU_TANH, elementwise.gelu_tanh)),
    Implementation("silu_and_mul", "native", make_silu_and_mul),
    Implementation("add", "native", make_add),
)
