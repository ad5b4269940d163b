"""Prefixes that stay in the cache until a time, whatever else wants blocks.

A pin names content, not blocks: it holds those of its blocks that are cached now, and each other one from the moment
that a request has computed it. Two pins that begin alike share what they hold.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from octavo.kv_cache.block_pool import BlockPool


class _Pin(NamedTuple):
    until: float
    digests: Sequence[bytes]


class Pins:
    """At most `max_blocks` different blocks, cached or to come, are pinned at once."""

    def __init__(self, pool: BlockPool, max_blocks: int) -> None:
        self._pool = pool
        self._max_blocks = max_blocks
        self._pins: dict[bytes, _Pin] = {}
        self._num_pins: dict[bytes, int] = {}
        self._blocks: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def blocks(self) -> Collection[int]:
        """The blocks that are held."""
        return self._blocks.values()

    def room_for(self, digests: Sequence[bytes]) -> int:
        """Return how many leading blocks of a prefix may be pinned."""
        num_known = next((i for i, digest in enumerate(digests) if digest not in self._num_pins), len(digests))
        return min(len(digests), num_known + self._max_blocks - len(self._num_pins))

    def pin(self, digests: Sequence[bytes], num_blocks: int, until: float) -> None:
        """Pin the first `num_blocks` blocks of a prefix that is not pinned, at most `room_for` it."""
        assert num_blocks <= self.room_for(digests), "more blocks are pinned than there is room for"
        kept = digests[:num_blocks]
        if kept:
            self._pins[digests[-1]] = _Pin(until, kept)
        for digest in kept:
            self._num_pins[digest] = self._num_pins.get(digest, 0) + 1
            self.hold(digest)

    def num_held(self, digests: Sequence[bytes]) -> int:
        """Return how many leading blocks of a prefix are held."""
        return next((i for i, digest in enumerate(digests) if digest not in self._blocks), len(digests))

    def hold(self, digest: bytes) -> None:
        """Hold the block with this content if there is one and it is pinned. Called for all that is published."""
        if digest in self._num_pins and digest not in self._blocks:
            block = self._pool.find(digest)
            if block is not None:
                self._pool.acquire(block)
                self._blocks[digest] = block

    def let_go(self, digest: bytes) -> None:
        """Hold the block with this content no longer, until there is another one."""
        if digest in self._blocks:
            self._pool.release(self._blocks.pop(digest))

    def unpin(self, digests: Sequence[bytes]) -> bool:
        """End the pin of exactly this prefix. Returns whether there was one."""
        pin = self._pins.pop(digests[-1], None) if digests else None
        if pin is None:
            return False
        for digest in reversed(pin.digests):
            self._num_pins[digest] -= 1
            if self._num_pins[digest] == 0:
                del self._num_pins[digest]
                if digest in self._blocks:
                    self._pool.release(self._blocks.pop(digest))
        return True

    def expire(self, now: float) -> None:
        """End the pins whose time is over."""
        for name in [name for name, pin in self._pins.items() if pin.until <= now]:
            self.unpin([name])

    def clear(self) -> int:
        """End all pins. Returns how many blocks they held."""
        num_held = len(self._blocks)
        self.expire(math.inf)
        return num_held

    def check(self) -> None:
        """Prove that exactly what is pinned and cached is held. Raises AssertionError."""
        wanted: dict[bytes, int] = {}
        for pin in self._pins.values():
            for digest in pin.digests:
                wanted[digest] = wanted.get(digest, 0) + 1
        assert wanted == self._num_pins, "pins and their counts differ"
        assert len(wanted) <= self._max_blocks, "more blocks are pinned than may be"
        cached = {digest: self._pool.find(digest) for digest in wanted}
        assert self._blocks == {digest: block for digest, block in cached.items() if block is not None}, (
            "something is pinned and cached but not held, or held but not pinned"
        )
