"""Normalisation, alone and fused with the residual addition."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.devices.cpu.runtime import TYPE_CODES, CpuRuntime, availability, dense, rows_of
from octavo.ops import layer_norm as layer_reference
from octavo.ops import rms_norm as reference
from octavo.ops.registry import Implementation

_TYPES = (torch.float32, torch.bfloat16)


def make_rms_norm(runtime: CpuRuntime) -> Callable[[Tensor, Tensor, float], Tensor]:
    """`octavo.ops.rms_norm.rms_norm` on the compiled library; other types than float32 and bfloat16 by reference."""
    kernel, empty = runtime.cpu.rms_norm, runtime.empty

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        dtype, shape = x.dtype, x.shape
        if dtype not in _TYPES or weight.dtype is not dtype:
            return reference.rms_norm(x, weight, eps)
        if len(shape) > 2:
            x = dense(x)
        out = empty(shape, dtype)
        count, dim, stride = rows_of(x)
        kernel(x.data_ptr(), 0, weight.data_ptr(), 0, out.data_ptr(), count, stride, dim, eps, TYPE_CODES[dtype])
        return out

    return rms_norm


def make_add_rms_norm(runtime: CpuRuntime) -> Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]:
    """`octavo.ops.rms_norm.add_rms_norm` likewise."""
    kernel, empty = runtime.cpu.rms_norm, runtime.empty

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        dtype, shape = x.dtype, x.shape
        if dtype not in _TYPES or weight.dtype is not dtype or residual.dtype is not dtype:
            return reference.add_rms_norm(x, residual, weight, eps)
        residual = dense(residual)
        if len(shape) > 2:
            x = dense(x)
        total, out = empty(shape, dtype), empty(shape, dtype)
        count, dim, stride = rows_of(x)
        kernel(
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            total.data_ptr(),
            out.data_ptr(),
            count,
            stride,
            dim,
            eps,
            TYPE_CODES[dtype],
        )
        return out, total

    return add_rms_norm


def make_layer_norm(runtime: CpuRuntime) -> Callable[[Tensor, Tensor | None, Tensor | None, float], Tensor]:
    """`octavo.ops.layer_norm.layer_norm` likewise."""
    kernel, empty = runtime.cpu.layer_norm, runtime.empty

    def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        dtype = x.dtype
        if dtype not in _TYPES or not _are_of(dtype, weight, bias):
            return layer_reference.layer_norm(x, weight, bias, eps)
        out = empty(x.shape, dtype)
        count, dim, stride = rows_of(x)
        kernel(
            x.data_ptr(),
            0,
            0 if weight is None else weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            0,
            out.data_ptr(),
            count,
            stride,
            dim,
            eps,
            TYPE_CODES[dtype],
        )
        return out

    return layer_norm


def make_add_layer_norm(
    runtime: CpuRuntime,
) -> Callable[[Tensor, Tensor, Tensor | None, Tensor | None, float], tuple[Tensor, Tensor]]:
    """`octavo.ops.layer_norm.add_layer_norm` likewise."""
    kernel, empty = runtime.cpu.layer_norm, runtime.empty

    def add_layer_norm(
        x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        dtype, shape = x.dtype, x.shape
        if dtype not in _TYPES or not _are_of(dtype, residual, weight, bias):
            return layer_reference.add_layer_norm(x, residual, weight, bias, eps)
        residual = dense(residual)
        total, out = empty(shape, dtype), empty(shape, dtype)
        count, dim, stride = rows_of(x)
        kernel(
            x.data_ptr(),
            residual.data_ptr(),
            0 if weight is None else weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            total.data_ptr(),
            out.data_ptr(),
            count,
            stride,
            dim,
            eps,
            TYPE_CODES[dtype],
        )
        return out, total

    return add_layer_norm


def _are_of(dtype: torch.dtype, *tensors: Tensor | None) -> bool:
    return all(tensor is None or tensor.dtype is dtype for tensor in tensors)


IMPLEMENTATIONS = (
    Implementation("rms_norm", "native", make_rms_norm, availability),
    Implementation("add_rms_norm", "native", make_add_rms_norm, availability),
    Implementation("layer_norm", "native", make_layer_norm, availability),
    Implementation("add_layer_norm", "native", make_add_layer_norm, availability),
)
