"""Normalisation, alone and fused with the residual addition."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.devices.cpu.runtime import FLOAT_TYPES, TYPE_CODES, CpuRuntime, dense, rows_of
from octavo.ops import norm as reference
from octavo.ops.registry import Implementation


def make_rms_norm(runtime: CpuRuntime) -> Callable[..., Tensor]:
    """Make `octavo.ops.norm.rms_norm`; types other than float32 and bfloat16 are left to the reference."""
    kernel, empty = runtime.cpu.rms_norm, runtime.empty

    def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        dtype, shape = x.dtype, x.shape
        if dtype not in FLOAT_TYPES or weight.dtype is not dtype:
            return reference.rms_norm(x, weight, eps, offset)
        out = empty(shape, dtype)
        rows, code = _rows_of_heads(x), TYPE_CODES[dtype]
        kernel(x.data_ptr(), 0, weight.data_ptr(), 0, out.data_ptr(), *rows, eps, code, offset)
        return out

    return rms_norm


def make_add_rms_norm(runtime: CpuRuntime) -> Callable[..., tuple[Tensor, Tensor]]:
    """Make `octavo.ops.norm.add_rms_norm`; of other types the reference."""
    kernel, empty = runtime.cpu.rms_norm, runtime.empty

    def add_rms_norm(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        dtype, shape = x.dtype, x.shape
        if dtype not in FLOAT_TYPES or weight.dtype is not dtype or residual.dtype is not dtype:
            return reference.add_rms_norm(x, residual, weight, eps, offset)
        residual = dense(residual)
        if len(shape) > 2:
            x = dense(x)
        total, out = empty(shape, dtype), empty(shape, dtype)
        count, dim, stride = rows_of(x)
        inputs, results = (x.data_ptr(), residual.data_ptr(), weight.data_ptr()), (total.data_ptr(), out.data_ptr())
        kernel(*inputs, *results, count, stride, 1, dim, eps, TYPE_CODES[dtype], offset)
        return out, total

    return add_rms_norm


def make_layer_norm(runtime: CpuRuntime) -> Callable[[Tensor, Tensor | None, Tensor | None, float], Tensor]:
    """Make `octavo.ops.norm.layer_norm`; of other types the reference."""
    kernel, empty = runtime.cpu.layer_norm, runtime.empty

    def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        dtype = x.dtype
        if dtype not in FLOAT_TYPES or not _are_of(dtype, weight, bias):
            return reference.layer_norm(x, weight, bias, eps)
        out, rows = empty(x.shape, dtype), _rows_of_heads(x)
        inputs = (x.data_ptr(), 0, _address(weight), _address(bias), 0, out.data_ptr())
        kernel(*inputs, *rows, eps, TYPE_CODES[dtype], weight is not None and weight.dim() > 1)
        return out

    return layer_norm


def make_add_layer_norm(
    runtime: CpuRuntime,
) -> Callable[[Tensor, Tensor, Tensor | None, Tensor | None, float], tuple[Tensor, Tensor]]:
    """Make `octavo.ops.norm.add_layer_norm`; of other types the reference."""
    kernel, empty = runtime.cpu.layer_norm, runtime.empty

    def add_layer_norm(
        x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        dtype, shape = x.dtype, x.shape
        if dtype not in FLOAT_TYPES or not _are_of(dtype, residual, weight, bias):
            return reference.add_layer_norm(x, residual, weight, bias, eps)
        residual = dense(residual)
        total, out = empty(shape, dtype), empty(shape, dtype)
        count, dim, stride = rows_of(x)
        inputs = (x.data_ptr(), residual.data_ptr(), _address(weight), _address(bias))
        kernel(*inputs, total.data_ptr(), out.data_ptr(), count, stride, 1, dim, eps, TYPE_CODES[dtype], False)
        return out, total

    return add_layer_norm


def _rows_of_heads(x: Tensor) -> tuple[int, int, int, int]:
    """x [tokens, dim] or [tokens, heads, dim] as rows: (how many, elements from token to token, heads, dim).

    Tokens may lie apart; the heads of a token lie side by side.
    """
    if len(x.shape) == 2:
        count, dim, stride = rows_of(x)
        return count, stride, 1, dim
    tokens, heads, dim = x.shape
    stride, head, inner = x.stride()
    assert (head == dim or heads == 1) and inner == 1, "heads of a token lie side by side"  # noqa: PT018
    return tokens * heads, stride, heads, dim


def _are_of(dtype: torch.dtype, *tensors: Tensor | None) -> bool:
    return all(tensor is None or tensor.dtype is dtype for tensor in tensors)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


IMPLEMENTATIONS = (
    Implementation("rms_norm", "native", make_rms_norm),
    Implementation("add_rms_norm", "native", make_add_rms_norm),
    Implementation("layer_norm", "native", make_layer_norm),
    Implementation("add_layer_norm", "native", make_add_layer_norm),
)
