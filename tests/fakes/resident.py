"""How much of a tensor's memory is really there."""

from __future__ import annotations

import mmap

import numpy as np
import torch

_PRESENT = np.uint64(1 << 63)


def resident_bytes(memory: torch.Tensor) -> int:
    """Return the bytes of the pages that `memory` touches and that the system has given it (/proc/self/pagemap)."""
    first = memory.data_ptr() // mmap.PAGESIZE
    end = -(-(memory.data_ptr() + memory.nbytes) // mmap.PAGESIZE)
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        pagemap.seek(8 * first)
        entries = np.frombuffer(pagemap.read(8 * (end - first)), dtype=np.uint64)
    assert len(entries) == end - first, "no such mapping"
    return int(np.count_nonzero(entries & _PRESENT)) * mmap.PAGESIZE
