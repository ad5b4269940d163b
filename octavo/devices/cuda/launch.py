"""Launches kernels by their names, so that either Triton or an archive of binaries can do it."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, Final, Protocol

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
        ...


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
