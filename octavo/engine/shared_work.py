"""What the core works at, and since when, in memory that it shares with its front."""

from __future__ import annotations

import mmap
import os
import struct
import time
from typing import Final

_WORK: Final = struct.Struct("=dd")
_UNMEASURED_S_PER_TOKEN: Final = 0.05
"""Assumed of a core that has measured nothing yet: slower than any device that somebody waits for."""
_HUNG_FACTOR: Final = 20.0
"""A step may take this many times as long as it should, and `_HUNG_AFTER_S` on top: steps over long contexts are slower
than the measured ones, and another program may have the machine."""
_HUNG_AFTER_S: Final = 60.0


class SharedWork:
    """What the core works at, in 16 bytes that both processes map: written by the core, read by the front.

    The front can read it while the core is stopped, or computes without letting go of its interpreter.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _WORK.size)

    @classmethod
    def create(cls) -> SharedWork:
        """A record in memory, whose `descriptor` another process can inherit."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("octavo-work")
        else:
            import tempfile

            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.truncate(descriptor, _WORK.size)
        return cls(descriptor)

    def begin(self, step_s: float) -> None:
        """The core begins to work on messages and a step, which should take at most `step_s` seconds."""
        _WORK.pack_into(self._memory, 0, time.monotonic(), step_s)

    def rest(self) -> None:
        """The core waits for messages."""
        _WORK.pack_into(self._memory, 0, 0.0, 0.0)

    def overdue(self, now: float) -> str | None:
        """Why the work in progress counts as hung at a time on the monotonic clock; None when it does not."""
        began_at, step_s = _WORK.unpack_from(self._memory)
        limit_s = _HUNG_AFTER_S + _HUNG_FACTOR * step_s
        if not began_at or now - began_at <= limit_s:
            return None
        return (
            f"the engine core has been in one step for {now - began_at:,.0f} s, and none should take more than "
            f"{step_s:,.1f} s; restart the server"
        )

    def close(self) -> None:
        """Unmap the memory in this process. Idempotent."""
        if not self._memory.closed:
            self._memory.close()
            os.close(self.descriptor)


def longest_step_s(max_num_tokens: int, tokens_per_s: float | None) -> float:
    """Seconds of a step with as many tokens as a step may have, at a measured rate; None: before one is known."""
    return max_num_tokens * (1 / tokens_per_s if tokens_per_s else _UNMEASURED_S_PER_TOKEN)
