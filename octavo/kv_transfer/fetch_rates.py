"""Measures how fast a tier loads blocks, and from which length on loading is faster than computing."""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

import msgspec

_MEMORY: Final = 0.8
"""Weight of a load relative to the one after it."""
_VALID_S: Final = 60.0
"""Seconds after which a load is made whatever was measured: the tier may have become faster."""
_FILE: Final = "rates"


class MeasuredRates(msgspec.Struct, kw_only=True):
    """The rates that an engine has measured, in a file beside the blocks for the next engine; None: not measured yet.

    time: Unix seconds. latency_s: time of a load besides that of its bytes.
    """

    time: float = 0.0
    bytes_per_s: float | None = None
    latency_s: float = 0.0
    prefill_tokens_per_s: float | None = None

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return the rates that the last engine has written into a folder of blocks; empty ones if there is no valid
        file."""
        try:
            return msgspec.json.decode((folder / _FILE).read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError):
            return cls()

    def break_even_blocks(self, block_size: int, block_bytes: int, state_bytes: int = 0) -> float:
        """Return the fewest blocks that, together with one state of `state_bytes`, are loaded in less time than
        computed; infinity if loading never is.

        Return 1 until all rates are measured.
        """
        if self.bytes_per_s is None or self.prefill_tokens_per_s is None:
            return 1
        gain_s = block_size / self.prefill_tokens_per_s - block_bytes / self.bytes_per_s
        once_s = self.latency_s + state_bytes / self.bytes_per_s
        return max(1, math.ceil(once_s / gain_s)) if gain_s > 0 else math.inf

    def render(self, block_size: int, block_bytes: int) -> str:
        """Return a line with the break-even length and the rates that it follows from."""
        if self.bytes_per_s is None or self.prefill_tokens_per_s is None:
            return (
                "not measured yet: an engine with this directory measures it, and until then fetches all that it finds"
            )
        fewest = self.break_even_blocks(block_size, block_bytes)
        length = (
            "prefixes of no length" if fewest == math.inf else f"prefixes of {fewest * block_size:,.0f} tokens or more"
        )
        return (
            f"{length} are fetched: the last engine loaded {self.bytes_per_s / 1e6:,.1f} MB/s with a latency of "
            f"{self.latency_s * 1e3:.1f} ms, and computed {self.prefill_tokens_per_s:,.0f} tokens/s"
        )


class FetchRates:
    """The rates of one tier: those measured by the last engine until this one has measured its own."""

    def __init__(
        self, measured: MeasuredRates, block_size: int, block_bytes: int, now: float, state_bytes: int = 0
    ) -> None:
        """block_bytes: bytes of a block on one rank. now: as in `note`. state_bytes: bytes of a prefix's recurrent
        state."""
        self.measured = measured
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._state_bytes = state_bytes
        self._bytes = self._seconds = 0.0
        self._last = -math.inf if measured.bytes_per_s is None else now

    def note(self, num_bytes: int, seconds: float, latency_s: float, now: float) -> None:
        """Note a load of `num_bytes` in `seconds`, besides which it waited `latency_s`."""
        if num_bytes and seconds > 0:
            is_first = not self._bytes
            self._bytes = self._bytes * _MEMORY + num_bytes
            self._seconds = self._seconds * _MEMORY + seconds
            self.measured.bytes_per_s = self._bytes / self._seconds
            before = latency_s if is_first else self.measured.latency_s
            self.measured.latency_s = _MEMORY * before + (1 - _MEMORY) * latency_s
            self.measured.time = time.time()
            self._last = now

    def is_worth_fetching(self, num_blocks: int, prefill_tokens_per_s: float | None, now: float) -> bool:
        """Return whether so many blocks are loaded in less time than computed, or the load would measure anew."""
        if not num_blocks or now > self._last + _VALID_S:
            return num_blocks > 0
        self.measured.prefill_tokens_per_s = prefill_tokens_per_s or self.measured.prefill_tokens_per_s
        return num_blocks >= self.measured.break_even_blocks(self._block_size, self._block_bytes, self._state_bytes)

    def write(self, folder: Path, prefill_tokens_per_s: float | None) -> None:
        """Write the rates down for the next engine."""
        self.measured.prefill_tokens_per_s = prefill_tokens_per_s or self.measured.prefill_tokens_per_s
        partial = folder / f"{_FILE}.{os.getpid()}"
        with suppress(OSError):  # the next engine measures them again
            partial.touch(mode=0o600)
            partial.write_bytes(msgspec.json.encode(self.measured))
            partial.replace(folder / _FILE)
