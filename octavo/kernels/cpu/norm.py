"""Normalisation, alone and fused with the residual addition."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.kernels.cpu._runtime import TYPE_CODES, CpuRuntime, availability, dense, rows_of
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


IMPLEMENTATIONS = (
    Implementation("rms_norm", "native", make_rms_norm, availability),
    Implementation("add_rms_norm", "native", make_add_rms_norm, availability),
)
