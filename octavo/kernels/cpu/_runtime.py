"""What CPU kernels run with: the compiled library at one instruction set, its threads, and reused memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.ops.registry import Availability
from octavo.platform import Platform

if TYPE_CHECKING:
    from octavo import _native

TYPE_CODES: Final[Mapping[torch.dtype, int]] = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""How the library numbers element types."""

_SMALLEST_BYTES = 256


class CpuRuntime:
    """One per worker. `cpu` has the kernels as methods, which take tensors as addresses."""

    def __init__(self, cpu: _native.Cpu) -> None:
        self.cpu = cpu
        self._buffers: dict[int, list[Tensor]] = {}

    @property
    def instruction_set(self) -> str:
        """The level that the kernels run at."""
        return str(self.cpu.instruction_set)

    @property
    def threads(self) -> int:
        """Threads that compute, the caller included."""
        return int(self.cpu.threads)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised dense tensor over memory that no other living tensor uses.

        Memory is kept and used again: fresh pages from the operating system cost more than most operators.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        size = max(_SMALLEST_BYTES, 1 << (num_bytes - 1).bit_length()) if num_bytes else _SMALLEST_BYTES
        buffers = self._buffers.setdefault(size, [])
        for buffer in buffers:
            if _is_unused(buffer):
                break
        else:
            buffer = torch.empty(size, dtype=torch.uint8)
            buffers.append(buffer)
        return buffer[:num_bytes].view(dtype).view(shape)


def open_runtime(platform: Platform, threads: int = 1, instruction_set: str = "auto") -> CpuRuntime | None:
    """The compiled kernels, or None where the reference operators do all the work.

    Raises ConfigError for an instruction set that this machine cannot run.
    """
    if not availability(platform).usable:
        if instruction_set in ("auto", "reference"):
            return None
        raise ConfigError(
            f"instruction_set is {instruction_set}, but {availability(platform).because}; leave it at auto"
        )
    if instruction_set == "reference":
        return None
    from octavo import _native

    try:
        return CpuRuntime(_native.Cpu(instruction_set, threads))
    except ValueError as error:
        raise ConfigError(f"instruction_set: {error}") from None


def availability(platform: Platform) -> Availability:
    """Whether the compiled kernels can run here."""
    if platform.native_module is None:
        return Availability(False, "the compiled library is absent: install octavo with a C++ compiler at hand")
    from octavo import _native

    levels = _native.instruction_sets()
    if not levels:
        return Availability(False, "this processor has no AVX2")
    return Availability(True, f"compiled for this processor ({levels[0]})")


def row_stride(x: Tensor) -> int:
    """Elements between rows of x [rows, dim]; its last dimension must be dense."""
    assert x.stride(-1) == 1 or x.shape[-1] == 1, "kernels read rows whose elements lie side by side"
    return x.stride(0)


def _is_unused(buffer: Tensor) -> bool:
    return bool(torch._C._storage_Use_Count(buffer.untyped_storage()._cdata) == 2)
