"""Large memory: weights, caches, and what they are made from."""

from __future__ import annotations

import mmap
from math import prod
from typing import Final

import torch
from torch import Tensor

_LARGE_PAGE_BYTES: Final = 2 << 20
_FROM_BYTES: Final = 2 * _LARGE_PAGE_BYTES
"""Less is not worth a mapping of its own."""
_CHUNK_BYTES: Final = 64 << 20
_LINE_BYTES: Final = 64


def zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """A dense tensor of zeros. On a CPU its pages come with the first write, large ones where the system has them.

    Pages are dear: 0.4 s per GiB in small ones, 0.1 s in large ones, 2 s where a virtual machine has to ask its host.
    Large pages are also read faster.
    """
    num_bytes = prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or num_bytes < _FROM_BYTES:
        return torch.zeros(shape, dtype=dtype, device=device)
    # room to start at a large page: what is never written is never there
    pages = mmap.mmap(-1, num_bytes + _LARGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    start = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % _LARGE_PAGE_BYTES
    return torch.frombuffer(pages, dtype=dtype, count=prod(shape), offset=start).view(shape)


class Arena:
    """Tensors that are kept for long, side by side in large pages: small ones are read as fast as large ones.

    A chunk of memory goes back when all tensors in it are gone.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def zeroed(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A dense tensor of zeros that starts at a multiple of 64 bytes; see `zeroed`."""
        num_bytes = prod(shape) * dtype.itemsize
        if self._used + num_bytes > self._chunk.numel():
            self._chunk, self._used = zeroed((max(_CHUNK_BYTES, num_bytes),), torch.uint8), 0
        part = self._chunk[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        return part.view(dtype).view(shape)


class Scratch:
    """Memory that passes from hand to hand: fresh pages from the operating system cost more than what is done in them.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lent: dict[int, Tensor] = {}

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """A dense tensor, not initialised, that is the caller's until it is given back."""
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes < _FROM_BYTES:
            return torch.empty(shape, dtype=dtype, device=device)
        fitting = [block for block in self._free if block.nbytes >= num_bytes and block.device == torch.device(device)]
        if fitting:
            block = min(fitting, key=lambda block: block.nbytes)
            self._free = [each for each in self._free if each is not block]
        else:
            block = zeroed((num_bytes,), torch.uint8, device)
        self._lent[block.data_ptr()] = block
        return block[:num_bytes].view(dtype).view(shape)

    def give_back(self, tensor: Tensor) -> None:
        """Take `tensor` back, where it was taken from here."""
        block = self._lent.pop(tensor.data_ptr(), None)
        if block is not None:
            self._free.append(block)

    def clear(self) -> None:
        """Let go of what nobody has."""
        self._free.clear()
