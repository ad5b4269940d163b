"""The settings that kernels on CUDA run with, and their launch by names: by Triton or from an archive of binaries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any, Final, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops.registry import Implementation, Ops, bind, implementations

OPTIONS: Final = {"enable_fp_fusion": True, "num_warps": 4, "num_stages": 3}
"""Options of a launch that states no others: fused sums and numbers of threads decide bits, and Triton's defaults
change."""


class Launcher(Protocol):
    """Launches a kernel on the current stream of torch."""

    def __call__(self, kernel: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """Launch `kernel`, "module.function" of octavo.devices.cuda.kernels, in a grid of one to three sizes.

        arguments: the kernel's tensors and numbers, in its order. constants: the kernel's constants, and options that
        differ from `OPTIONS`; TYPE is the name of a type of Triton.
        """


def launch_by_triton(kernel: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel as `Launcher` does. Triton compiles it at its first launch."""
    triton_function(kernel)[grid](*arguments, **{**OPTIONS, **triton_constants(constants)})


@cache
def triton_function(kernel: str) -> Any:
    """Return Triton's function of a kernel."""
    module, _, name = kernel.rpartition(".")
    return getattr(import_module(f"octavo.devices.cuda.kernels.{module}"), name)


def triton_constants(constants: dict[str, Any]) -> dict[str, Any]:
    """Return constants with Triton's type in place of the name in TYPE."""
    import triton.language as tl

    return {**constants, "TYPE": getattr(tl, constants["TYPE"])} if "TYPE" in constants else constants


@dataclass(frozen=True)
class CudaRuntime:
    """The settings that kernels on CUDA run with, and their launcher."""

    is_invariant: bool = False
    """Whether the bits of a row must not depend on the others, which costs speed."""
    launch: Launcher = launch_by_triton
    """Launches kernels."""
    shared_bytes: int = 228 << 10
    """Bytes of shared memory of an SM; by default those of Hopper and Blackwell."""
    has_float8: bool = False
    """Whether the GPU decodes floats of 8 bits, from capability 8.9 on."""

    @property
    def has_large_shared(self) -> bool:
        """Whether an SM has room for tiles of their full size: A100 and data centre GPUs after it, with 164 KiB and
        more; others have 100."""
        return self.shared_bytes > 160 << 10

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
