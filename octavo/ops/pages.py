"""Large memory from the operating system, without torch; its pages are fetched at the first write, or ahead of it."""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from typing import Final

LARGE_PAGE_BYTES: Final = 2 << 20
_STEP_BYTES: Final = 32 << 20
_POPULATE_WRITE: Final = 23
"""MADV_POPULATE_WRITE of Linux 5.14: as if a byte of every page were written, without changing any."""


class Pages:
    """`num_bytes` of zeros that begin at byte `start` of `memory`, at a large page, where the system has such pages."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        # room to start at a large page: what is never written is never there
        self.memory = mmap.mmap(-1, num_bytes + LARGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.start = -self._base % LARGE_PAGE_BYTES
        self.populated_bytes = 0
        """Bytes that `populate` has fetched so far."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def populate(self, num_bytes: int) -> None:
        """Fetch the first `num_bytes` in a thread, until `release_from`; nothing where the system cannot."""
        self._thread = threading.Thread(target=self._populate, args=(num_bytes,), name="octavo-pages", daemon=True)
        self._thread.start()

    def release_from(self, offset: int) -> None:
        """Release the pages from byte `offset` on, counted from `start`. They are zeros again."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        first = -(-(self.start + offset) // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
        if hasattr(mmap, "MADV_DONTNEED") and first < len(self.memory):
            self.memory.madvise(mmap.MADV_DONTNEED, first)

    def _populate(self, num_bytes: int) -> None:
        while self.populated_bytes < num_bytes and not self._stop.is_set():
            count = min(_STEP_BYTES, num_bytes - self.populated_bytes)
            if not fetch(self._base + self.start + self.populated_bytes, count):
                return
            self.populated_bytes += count


def release(address: int, num_bytes: int) -> None:
    """Release the large pages that lie wholly in the bytes at `address`, of private memory; they are zeros again."""
    first = -(-address // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
    last = (address + num_bytes) // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES
    if sys.platform == "linux" and first < last:
        _advise(first, last - first, mmap.MADV_DONTNEED)


def fetch(address: int, num_bytes: int) -> bool:
    """Fetch the pages of these bytes, whose content stays. Returns False where the system cannot, or has no memory,
    which the first write there reports."""
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    return sys.platform == "linux" and _advise(first, address + num_bytes - first, _POPULATE_WRITE) == 0


def trim_heap() -> None:
    """Release freed memory that the C library holds, where it has a call for that (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _advise(address: int, num_bytes: int, advice: int) -> int:
    """Call madvise(2) without the interpreter's lock; return another number than 0 where the system refuses."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return int(madvise(address, num_bytes, advice))
