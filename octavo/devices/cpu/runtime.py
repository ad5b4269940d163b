"""What CPU kernels run with: the compiled library at one instruction set, its threads, and reused memory."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from sys import getrefcount
from typing import TYPE_CHECKING, Final, TypeVar

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.ops.memory import WeightArena
from octavo.ops.registry import Ops, bind, implementations
from octavo.platform import Platform

if TYPE_CHECKING:
    from octavo import _native

T = TypeVar("T")

TYPE_CODES: Final[Mapping[torch.dtype, int]] = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""The library's numbers of element types."""
FLOAT_TYPES: Final = (torch.float32, torch.bfloat16)
"""The types that kernels compute in; others are left to the reference."""

_INSTALL = (
    "install a C++20 compiler (g++ or clang++), then octavo again "
    "(in a checkout: pip install --force-reinstall --no-deps .)"
)
_SMALLEST_BYTES = 256
_READY_BYTES = 64 << 10
"""Bytes of the largest tensor that is kept in its shape for the next use."""
_ALL_READY_BYTES = 16 << 20
"""Most bytes of all tensors that are kept in their shape."""
_READY_OF_A_SHAPE = 16
"""Most tensors that are kept in one shape: looking through many costs more than making one."""


class _Memory:
    """Memory of activations: tensors that are kept in their shapes, and buffers by type, ascending by size.

    A buffer stands beside its storage and its size. `held` counts the bytes of both. Buffers are made larger than their
    tensors by the ratio of `room`: the most rows of a step, and the rows of this one.
    """

    __slots__ = ("buffers", "held", "limit", "ready", "ready_bytes_left", "room")

    def __init__(self, ready_bytes: int) -> None:
        self.ready: dict[tuple[tuple[int, ...], torch.dtype], list[tuple[Tensor, int]]] = {}
        self.ready_bytes_left = ready_bytes
        self.buffers: dict[torch.dtype, list[tuple[Tensor, int, int]]] = {}
        self.held = 0
        self.limit = sys.maxsize
        self.room = (1, 1)


class CpuRuntime:
    """One per worker. `cpu` has the kernels as methods, which take tensors as addresses; `weights` is their memory."""

    def __init__(self, cpu: _native.Cpu, device: str = "cpu") -> None:
        """device: meta for a dry run, whose tensors have no data."""
        self.cpu = cpu
        self.weights = WeightArena()
        self._device = device
        self._idle_references, self._idle_uses = _idle_counts()
        self._memory = _Memory(_ALL_READY_BYTES)
        self._memory_of_recordings = _Memory(0)

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
        """Why the kernels of the compiled library are chosen."""
        return f"compiled; runs at {self.instruction_set}"

    @property
    def instruction_set(self) -> str:
        """The level that the kernels run at."""
        return str(self.cpu.instruction_set)

    @property
    def threads(self) -> int:
        """The number of threads that compute, the caller included."""
        return int(self.cpu.threads)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised dense tensor over memory that no other living tensor uses.

        Memory is used again: fresh pages from the operating system cost more than most operators. Small tensors are
        kept as they are, by shape: making one costs more than many a kernel.
        """
        use_count, references, uses = torch._C._storage_Use_Count, self._idle_references, self._idle_uses
        memory = self._memory
        kept = memory.ready.get((shape, dtype))
        if kept is not None:
            for tensor, storage in kept:
                # nothing else refers to the tensor, and no view to its storage
                if getrefcount(tensor) == references and use_count(storage) == uses:
                    return tensor
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes <= min(_READY_BYTES, memory.ready_bytes_left) and (kept is None or len(kept) < _READY_OF_A_SHAPE):
            size = max(num_bytes, _SMALLEST_BYTES)
            self._count(size)
            memory.ready_bytes_left -= size
            tensor = self._allocate(shape, dtype)
            memory.ready.setdefault((tuple(shape), dtype), []).append((tensor, tensor.untyped_storage()._cdata))
            return tensor
        return self._cut(num_bytes, shape, dtype)

    def _cut(self, num_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor over a part of the smallest unused buffer that is large enough."""
        memory, use_count, uses = self._memory, torch._C._storage_Use_Count, self._idle_uses
        most_rows, rows = memory.room
        size = _buffer_bytes(num_bytes * most_rows // rows)
        unused = (
            buffer
            for buffer, storage, capacity in memory.buffers.get(dtype, ())
            if capacity >= size and use_count(storage) == uses
        )
        buffer = next(unused, None)
        if buffer is None:
            self._count(size)
            buffer = self._allocate((size // dtype.itemsize,), dtype)
            buffers = memory.buffers.setdefault(dtype, [])
            buffers.append((buffer, buffer.untyped_storage()._cdata, size))
            buffers.sort(key=lambda each: each[2])
        strides = [1]
        for extent in shape[:0:-1]:
            strides.append(strides[-1] * extent)
        return buffer.as_strided(shape, strides[::-1])

    def _count(self, num_bytes: int) -> None:
        """Count memory that is about to be allocated; release idle memory where the limit would be exceeded."""
        memory = self._memory
        if memory.held + num_bytes > memory.limit:
            self.release_idle()
        memory.held += num_bytes

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        # the watch over a recording need not see this call: this memory stays
        with torch._C.DisableTorchFunction():
            return torch.empty(shape, dtype=dtype, device=self._device)

    @property
    def held_bytes(self) -> int:
        """Bytes of memory of activations, without those of recordings."""
        return self._memory.held

    @property
    def recorded_bytes(self) -> int:
        """Bytes of memory of activations of recordings."""
        return self._memory_of_recordings.held

    def limit_memory(self, num_bytes: int) -> None:
        """Release idle memory of activations before more than `num_bytes` is held, that of recordings not counted."""
        self._memory.limit = num_bytes

    def release_idle(self) -> None:
        """Release the memory that no tensor uses, except that of recordings."""
        memory, use_count = self._memory, torch._C._storage_Use_Count
        memory.ready.clear()
        memory.ready_bytes_left = min(_ALL_READY_BYTES, memory.limit)
        for dtype, buffers in memory.buffers.items():
            memory.buffers[dtype] = [each for each in buffers if use_count(each[1]) != self._idle_uses]
        memory.held = sum(capacity for buffers in memory.buffers.values() for _, _, capacity in buffers)

    def record(self, compute: Callable[[], T], room: tuple[int, int] = (1, 1)) -> tuple[T, _native.Recording]:
        """Return what `compute` returns, and the kernel calls that it made.

        Memory that it takes by `empty` is given to recordings only, one after the other, and never given back: the
        calls may be made again while anything else is alive but what other recordings computed. `room` is the most rows
        that a recorded step has, and the rows of this one: each buffer has room for the most.
        """
        ordinary, self._memory = self._memory, self._memory_of_recordings
        self._memory.room = room
        self.cpu.begin_recording()
        try:
            result = compute()
        finally:
            calls = self.cpu.end_recording()
            self._memory = ordinary
        return result, calls


def _buffer_bytes(num_bytes: int) -> int:
    """Return the size of the buffer for a tensor: at most an eighth more."""
    step = max(_SMALLEST_BYTES, 1 << max(0, num_bytes.bit_length() - 4))
    return -(-max(num_bytes, 1) // step) * step


def _idle_counts() -> tuple[int, int]:
    """Return the references of a tensor that only a list holds while a loop goes over it, and the uses of its storage.

    The call that counts adds references of its own, by rules that differ between versions of Python.
    """
    tensor = torch.empty(1)
    kept = [(tensor, tensor.untyped_storage()._cdata)]
    del tensor
    for tensor, storage in kept:
        return getrefcount(tensor), torch._C._storage_Use_Count(storage)
    raise AssertionError("the list is not empty")


def obstacle(platform: Platform) -> str | None:
    """Return why the compiled kernels cannot run here; None where they can."""
    if platform.native_module is None:
        return f"the compiled library is absent: {_remedy(Path(__file__).parents[2])}"
    from octavo import _native

    return None if _native.instruction_sets() else "this processor has no AVX2"


def _remedy(package: Path) -> str:
    """Return what brings the compiled library; `package` may be a checkout that hides an installation with it."""
    try:
        installed = Path(str(metadata.distribution("octavo").locate_file("octavo")))
    except metadata.PackageNotFoundError:
        return _INSTALL
    if installed.resolve() == package.resolve() or not any(installed.glob("_native*")):
        return _INSTALL
    return (
        f"{package} was imported, and not {installed}, which has it; "
        "start Python in another directory, or install the checkout with pip install -e ."
    )


def lacks(kernel: str) -> Callable[[CpuRuntime], str | None]:
    """Return the obstacle of an implementation whose kernel an older compiled library, beside this code, lacks."""
    return lambda runtime: None if hasattr(runtime.cpu, kernel) else f"the compiled library is older: {_INSTALL}"


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
    """Return x itself where its elements lie side by side, else a copy."""
    return x if x.is_contiguous() else x.contiguous()
