"""Functions of single elements that torch would compute in several launches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor

from octavo.devices.cuda.runtime import CudaRuntime, dense
from octavo.ops.registry import Implementation

BLOCK: Final = 1024
_GATED: Final = ("silu_and_mul", "gelu_tanh_and_mul", "clamped_swiglu")
"""Operators that take gate beside up."""


def _launch(runtime: CudaRuntime, function: str, x: Tensor, y: Tensor, first: float, second: float) -> Tensor:
    """Return the function of x and y [tokens, dim], of one type, and of two numbers."""
    x, y = dense(x), dense(y)
    tokens, dim = x.shape
    out = torch.empty((tokens, dim), dtype=x.dtype, device=x.device)
    runtime.launch(
        "elementwise.elementwise",
        (tokens, -(-dim // BLOCK)),
        *(x, y, out, dim, x.stride(0), y.stride(0), first, second),
        FUNCTION=function,
        BLOCK=BLOCK,
    )
    return out


def make_gated(function: str, runtime: CudaRuntime) -> Callable[..., Tensor]:
    """Make a function of `octavo.ops.elementwise` that takes gate beside up."""

    def gated(x: Tensor, first: float = 0.0, second: float = 0.0) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return _launch(runtime, function, gate, up, first, second)

    return gated


def make_of_two(function: str, runtime: CudaRuntime) -> Callable[[Tensor, Tensor], Tensor]:
    """Make a function of `octavo.ops.elementwise` that takes two tensors."""
    return lambda x, y: _launch(runtime, function, x, y, 0.0, 0.0)


def make_soft_capped(runtime: CudaRuntime) -> Callable[[Tensor, float], Tensor]:
    """Make `octavo.ops.elementwise.soft_capped`."""
    return lambda x, cap: _launch(runtime, "soft_capped", x, x, cap, 0.0)


IMPLEMENTATIONS = (
    *(Implementation(name, "triton", partial(make_gated, name)) for name in _GATED),
    *(Implementation(name, "triton", partial(make_of_two, name)) for name in ("gated_by_sigmoid", "gated_by_softplus")),
    Implementation("silu_times", "triton", partial(make_of_two, "silu_and_mul")),
    Implementation("soft_capped", "triton", make_soft_capped),
)
