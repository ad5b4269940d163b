"""The settings and the launcher that kernels on CUDA run with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.devices.cuda.launch import Launcher, launch_by_triton
from octavo.ops.registry import Implementation, Ops, bind, implementations


@dataclass(frozen=True)
class CudaRuntime:
    """is_invariant: the bits of a row must not depend on the others, which costs speed. launch: launches kernels.
    shared_bytes: shared memory of an SM; by default that of Hopper and Blackwell. has_float8: whether the GPU decodes
    floats of 8 bits, from capability 8.9 on."""

    is_invariant: bool = False
    launch: Launcher = launch_by_triton
    shared_bytes: int = 228 << 10
    has_float8: bool = False

    def floats(self, codes: Tensor) -> Tensor:
        """Return codes of E4M3, uint8, as float8_e4m3fn where the GPU decodes these, else unchanged."""
        return codes.view(torch.float8_e4m3fn) if self.has_float8 else codes

    def bind(self, overrides: dict[str, str] | None = None) -> Ops:
        """Return the operators. overrides: implementations by the names of operators."""
        return bind(implementations("octavo.devices.cuda.ops"), overrides, runtime=self, because="made for CUDA")


def compute_type(x: Tensor) -> str:
    """Return Triton's name of the type in which x is multiplied. The interpreter multiplies float32 only."""
    if x.device.type == "cpu" or x.dtype is torch.float32:
        return "float32"
    return "bfloat16" if x.dtype is torch.bfloat16 else "float16"


def power_of_2(number: int, least: int = 16) -> int:
    """Return the smallest power of 2 that is no less than the number, and at least `least`."""
    return max(least, 1 << (number - 1).bit_length())


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array on a device, without waiting for what runs there. The array may be changed afterwards."""
    return torch.from_numpy(array).to(device, non_blocking=True)


def dense(x: Tensor) -> Tensor:
    """Return x with the elements of its last dimension side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def implementation(function: Callable[..., Any]) -> Implementation:
    """Return the implementation in Triton of the operator of this name. It takes the runtime first."""
    return Implementation(function.__name__, "triton", lambda runtime: partial(function, runtime))
