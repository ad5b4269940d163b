"""How fast a tier supplies blocks, as measured by loads, and from which length on that is faster than computing."""

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
"""A load later than this after the last one is made whatever was measured: the tier may have become faster."""
_FILE: Final = "rates"


class MeasuredRates(msgspec.Struct, kw_only=True):
    """What an engine has measured, in a file beside the blocks for the next one; None for nothing yet.

    time: seconds since 1970. latency_s: of a load, beside the time that its bytes take.
    """

    time: float = 0.0
    bytes_per_s: float | None = None
    latency_s: float = 0.0
    prefill_tokens_per_s: float | None = None

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return what the last engine has written into a folder of blocks; without values where there is nothing."""
        try:
            return msgspec.json.decode((folder / _FILE).read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError):
            return cls()

    def break_even_blocks(self, block_size: int, block_bytes: int, state_bytes: int = 0) -> float:
        """Return the fewest blocks that are loaded in less time than computed, together with one of `state_bytes`;
        infinity where none are.

        Before everything is measured that is one block.
        """
        if self.bytes_per_s is None or self.prefill_tokens_per_s is None:
            return 1
        gain_s = block_size / self.prefill_tokens_per_s - block_bytes / self.bytes_per_s
        once_s = self.latency_s + state_bytes / self.bytes_per_s
        return max(1, math.ceil(once_s / gain_s)) if gain_s > 0 else math.inf

    def render(self, block_size: int, block_bytes: int) -> str:
        """Return the break-even length in one line, and what it follows from."""
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
    """The rates of one tier: what the last engine has measured, until this one has."""

    def __init__(
        self, measured: MeasuredRates, block_size: int, block_bytes: int, now: float, state_bytes: int = 0
    ) -> None:
        """block_bytes: of a block on one rank. now: as in `note`. state_bytes: of the state that a prefix has."""
        self.measured = measured
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._state_bytes = state_bytes
        self._bytes = self._seconds = 0.0
        self._last = -math.inf if measured.bytes_per_s is None else now

    def note(self, num_bytes: int, seconds: float, latency_s: float, now: float) -> None:
        """Note a load of `num_bytes` in `seconds`, which waited `latency_s` more before and after that."""
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
