"""Functions of single elements that torch would compute in several launches."""

from __future__ import annotations

from functools import partial
from typing import Final

import torch
from torch import Tensor

from octavo.devices.cuda.runtime import CudaRuntime, dense
from octavo.ops.registry import Implementation

BLOCK: Final = 1024
_GATED: Final = ("silu_and_mul", "gelu_tanh_and_mul", "clamped_swiglu")
"""Operators that take gate beside up."""
_OF_TWO: Final = ("gated_by_sigmoid", "gated_by_softplus")


def of_two(
    function: str, runtime: CudaRuntime, x: Tensor, y: Tensor, first: float = 0.0, second: float = 0.0
) -> Tensor:
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


def of_halves(function: str, runtime: CudaRuntime, x: Tensor, *numbers: float) -> Tensor:
    """Return the function of both halves of x [tokens, 2 · dim], gate beside up."""
    gate, up = x.chunk(2, dim=-1)
    return of_two(function, runtime, gate, up, *numbers)


def _capped(runtime: CudaRuntime, x: Tensor, cap: float) -> Tensor:
    return of_two("soft_capped", runtime, x, x, cap)


IMPLEMENTATIONS = (
    *(Implementation(name, "triton", partial(partial, of_halves, name)) for name in _GATED),
    *(Implementation(name, "triton", partial(partial, of_two, name)) for name in _OF_TWO),
    Implementation("silu_times", "triton", partial(partial, of_two, "silu_and_mul")),
    Implementation("soft_capped", "triton", partial(partial, _capped)),
)
