"""What CPU kernels run with: the compiled library at one instruction set, its threads, and reused memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from sys import getrefcount
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.ops.memory import Arena
from octavo.ops.registry import Ops, bind, implementations
from octavo.platform import Platform

if TYPE_CHECKING:
    from octavo import _native

TYPE_CODES: Final[Mapping[torch.dtype, int]] = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""How the library numbers element types."""

_ABSENT = (
    "the compiled library is absent: install a C++20 compiler (g++ or clang++), then octavo again "
    "(in a checkout: pip install --force-reinstall --no-deps .)"
)
_SMALLEST_BYTES = 256
_READY_BYTES = 64 << 10
"""Largest tensor that is kept in its shape."""
_ALL_READY_BYTES = 16 << 20
"""Most memory in such tensors."""
_READY_OF_A_SHAPE = 16
"""Most of them in one shape: looking through many costs more than making one."""


class CpuRuntime:
    """One per worker. `cpu` has the kernels as methods, which take tensors as addresses; `weights` is their memory."""

    def __init__(self, cpu: _native.Cpu) -> None:
        self.cpu = cpu
        self.weights = Arena()
        self._idle_references, self._idle_uses = _idle_counts()
        self._ready: dict[tuple[tuple[int, ...], torch.dtype], list[tuple[Tensor, int]]] = {}
        self._ready_bytes_left = _ALL_READY_BYTES
        self._buffers: dict[tuple[int, torch.dtype], list[tuple[Tensor, int]]] = {}
        self._memory_of_recordings: tuple[Any, int, Any] = ({}, _ALL_READY_BYTES, {})

    @classmethod
    def open(cls, threads: int = 1, instruction_set: str = "auto") -> CpuRuntime:
        """Return a runtime. Raises ConfigError for an instruction set that this machine cannot run."""
        from octavo import _native

        try:
            return cls(_native.Cpu(instruction_set, threads))
        except ValueError as error:
            raise ConfigError(f"instruction_set: {error}") from None

    def bind(self, overrides: Mapping[str, str] | None = None) -> Ops:
        """Return the operators that run with this runtime; see `octavo.ops.registry.bind`."""
        return bind(implementations("octavo.devices.cpu.ops"), overrides, runtime=self, because=self.because)

    @property
    def because(self) -> str:
        """Why its kernels are chosen."""
        return f"compiled; runs at {self.instruction_set}"

    @property
    def instruction_set(self) -> str:
        """The level that the kernels run at."""
        return str(self.cpu.instruction_set)

    @property
    def threads(self) -> int:
        """Threads that compute, the caller included."""
        return int(self.cpu.threads)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised dense tensor over memory that no other living tensor uses.

        Memory is used again and never released: fresh pages from the operating system cost more than most operators,
        and recordings use the addresses that they were made with. Small tensors are kept as they are, by shape: making
        one costs more than many a kernel.
        """
        use_count, references, uses = torch._C._storage_Use_Count, self._idle_references, self._idle_uses
        kept = self._ready.get((shape, dtype))
        if kept is not None:
            for tensor, storage in kept:
                # nothing else refers to the tensor, and no view to its storage
                if getrefcount(tensor) == references and use_count(storage) == uses:
                    return tensor
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes <= min(_READY_BYTES, self._ready_bytes_left) and (kept is None or len(kept) < _READY_OF_A_SHAPE):
            self._ready_bytes_left -= max(num_bytes, _SMALLEST_BYTES)
            tensor = _allocate(shape, dtype)
            self._ready.setdefault((tuple(shape), dtype), []).append((tensor, tensor.untyped_storage()._cdata))
            return tensor
        return self._cut(num_bytes, shape, dtype)

    def _cut(self, num_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor over a part of an unused buffer, whose size is a power of two."""
        size = max(_SMALLEST_BYTES, 1 << (num_bytes - 1).bit_length()) if num_bytes else _SMALLEST_BYTES
        buffers = self._buffers.setdefault((size, dtype), [])
        buffer = next(
            (each for each, storage in buffers if torch._C._storage_Use_Count(storage) == self._idle_uses), None
        )
        if buffer is None:
            buffer = _allocate((size // dtype.itemsize,), dtype)
            buffers.append((buffer, buffer.untyped_storage()._cdata))
        strides = [1]
        for extent in shape[:0:-1]:
            strides.append(strides[-1] * extent)
        return buffer.as_strided(shape, strides[::-1])

    def release_idle(self) -> None:
        """Release the large buffers that no tensor uses, except those of recordings."""
        self._buffers.clear()

    def record(self, compute: Callable[[], Tensor]) -> tuple[Tensor, _native.Recording]:
        """Return the result of `compute`, and the kernel calls that it made.

        Memory that it takes by `empty` serves recordings only, one after the other: the calls may be repeated while
        anything is alive except the results of other recordings.
        """
        self._swap_memory()
        self.cpu.begin_recording()
        try:
            result = compute()
        finally:
            calls = self.cpu.end_recording()
            self._swap_memory()
        return result, calls

    def _swap_memory(self) -> None:
        memory = self._ready, self._ready_bytes_left, self._buffers
        self._ready, self._ready_bytes_left, self._buffers = self._memory_of_recordings
        self._memory_of_recordings = memory


def _idle_counts() -> tuple[int, int]:
    """References of a tensor that only a list holds while a loop goes over it, and uses of its storage.

    Who counts is counted, by rules that differ between versions of Python.
    """
    tensor = torch.empty(1)
    kept = [(tensor, tensor.untyped_storage()._cdata)]
    del tensor
    for tensor, storage in kept:
        return getrefcount(tensor), torch._C._storage_Use_Count(storage)
    raise AssertionError("the list is not empty")


def _allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    # who watches a recording for torch's operators need not know: this memory stays
    with torch._C.DisableTorchFunction():
        return torch.empty(shape, dtype=dtype)


def obstacle(platform: Platform) -> str | None:
    """Return why the compiled kernels cannot run here; None where they can."""
    if platform.native_module is None:
        return _ABSENT
    from octavo import _native

    return None if _native.instruction_sets() else "this processor has no AVX2"


def rows_of(x: Tensor) -> tuple[int, int, int]:
    """x [..., dim] as rows: (how many, dim, elements from row to row). Those of a matrix may lie apart."""
    shape, strides = x.shape, x.stride()
    dim = shape[-1]
    assert strides[-1] == 1 or dim == 1, "kernels read rows whose elements lie side by side"
    if len(shape) == 2:
        return shape[0], dim, strides[0]
    assert x.is_contiguous(), "rows of more than two dimensions lie side by side"
    return math.prod(shape[:-1]), dim, dim


def dense(x: Tensor) -> Tensor:
    """x itself where its elements lie side by side, else a copy."""
    return x if x.is_contiguous() else x.contiguous()
