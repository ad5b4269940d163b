"""Large memory: weights, caches, and what they are made from."""

from __future__ import annotations

from math import prod
from typing import Final

import torch
from torch import Tensor

from octavo.ops.pages import LARGE_PAGE_BYTES, Pages

_FROM_BYTES: Final = 2 * LARGE_PAGE_BYTES
"""Bytes from which a tensor gets a mapping of its own."""
_CHUNK_BYTES: Final = 64 << 20
_LINE_BYTES: Final = 64


def zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return a dense tensor of zeros. On a CPU its pages are fetched at the first write, large ones if there are any.

    Pages are expensive: 0.4 s per GiB in small ones, 0.1 s in large ones, 2 s where a virtual machine gets them from
    its host. Large pages are also read faster.
    """
    num_bytes = prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or num_bytes < _FROM_BYTES:
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = Pages(num_bytes)
    return torch.frombuffer(pages.memory, dtype=dtype, count=prod(shape), offset=pages.start).view(shape)


class WeightArena:
    """Places long-lived tensors side by side in large pages, so that small ones are read as fast as large ones.

    A chunk of memory is freed with the last tensor in it.
    """

    def __init__(self) -> None:
        self._chunk = _Chunk(torch.empty(0, dtype=torch.uint8))
        self._ahead: tuple[Pages, _Chunk] | None = None

    def begin_with(self, pages: Pages) -> None:
        """Use memory of `pages` for tensors that fit there, until `trim`."""
        memory = torch.frombuffer(pages.memory, dtype=torch.uint8, count=pages.num_bytes, offset=pages.start)
        self._ahead = (pages, _Chunk(memory))

    def trim(self) -> None:
        """Release the unused rest of the pages of `begin_with`."""
        if self._ahead is not None:
            pages, chunk = self._ahead
            pages.release_from(chunk.used)
            self._ahead = None

    def zeroed(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a dense tensor of zeros that starts at a multiple of 64 bytes; see `zeroed`."""
        num_bytes = prod(shape) * dtype.itemsize
        part = None if self._ahead is None else self._ahead[1].take(num_bytes)
        if part is None:
            part = self._chunk.take(num_bytes)
        if part is None:
            self._chunk = _Chunk(zeroed((max(_CHUNK_BYTES, num_bytes),), torch.uint8))
            part = self._chunk.take(num_bytes)
        assert part is not None
        return part.view(dtype).view(shape)


class _Chunk:
    """Memory that is allocated from its first byte on; `used` counts the allocated bytes."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self.used = 0

    def take(self, num_bytes: int) -> Tensor | None:
        """Return the next `num_bytes`, or None where there are fewer."""
        if self.used + num_bytes > self._memory.numel():
            return None
        part = self._memory[self.used : self.used + num_bytes]
        self.used = min(self._memory.numel(), self.used + -(-num_bytes // _LINE_BYTES) * _LINE_BYTES)
        return part


class Scratch:
    """Memory that is used again and again: fresh pages from the operating system cost more than the work in them.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lent: dict[int, Tensor] = {}

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """Return a dense tensor, not initialised, that is reserved until `give_back`."""
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
        """Make the memory of `tensor` free again, if `take` returned it."""
        block = self._lent.pop(tensor.data_ptr(), None)
        if block is not None:
            self._free.append(block)

    def clear(self) -> None:
        """Release all free memory."""
        self._free.clear()
