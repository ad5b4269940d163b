"""Which cached block without users is evicted first."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain
from typing import Protocol


class Eviction(Protocol):
    """The cached blocks without users, in the order in which they are evicted."""

    def __contains__(self, block: object) -> bool: ...

    def __iter__(self) -> Iterator[int]:
        """Iterate over the blocks, in any order."""

    def add(self, block: int, num_hits: int) -> None:
        """Add a block without users that was found `num_hits` times. Tails come before their heads."""

    def remove(self, block: int) -> None:
        """Remove a block that is used again."""

    def peek(self) -> int:
        """Return the block to evict. Raises KeyError when there is none."""

    def pop(self) -> int:
        """Remove and return the block to evict. Raises KeyError when there is none."""


class SpareFirst:
    """Evicts blocks that are worth less than others (spare ones) before those of `others`, the oldest first."""

    def __init__(self, others: Eviction) -> None:
        self._others = others
        self._spare: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: object) -> bool:
        return block in self._spare or block in self._others

    def __iter__(self) -> Iterator[int]:
        return chain(self._spare, self._others)

    def add(self, block: int, num_hits: int) -> None:
        self._others.add(block, num_hits)

    def add_spare(self, block: int) -> None:
        """Add a block without users that is evicted before others."""
        self._spare[block] = None

    def remove(self, block: int) -> None:
        if block in self._spare:
            del self._spare[block]
        else:
            self._others.remove(block)

    def peek(self) -> int:
        return next(iter(self._spare)) if self._spare else self._others.peek()

    def pop(self) -> int:
        return self._spare.popitem(last=False)[0] if self._spare else self._others.pop()


class LeastRecentlyUsed:
    """Evicts the block that was released longest ago."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: object) -> bool:
        return block in self._blocks

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def add(self, block: int, num_hits: int) -> None:
        self._blocks[block] = None

    def remove(self, block: int) -> None:
        del self._blocks[block]

    def peek(self) -> int:
        for block in self._blocks:
            return block
        raise KeyError("no block is cached")

    def pop(self) -> int:
        return self._blocks.popitem(last=False)[0]


class GreedyDual:
    """Evicts the block that is expected to save least: its worth is the number of times it was found, plus a clock.

    The clock is the worth of the block that was evicted last, so blocks that are no longer found lose to new ones.
    All blocks cost the same to compute again, and a hit on a block is one on all before it: heads never go before
    their tails. Source: Cao and Irani, "Cost-Aware WWW Proxy Caching Algorithms", USENIX ITS 1997 (with frequency:
    Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency", HPL-98-69).
    """

    def __init__(self) -> None:
        self._clock = 0
        self._count = 0
        self._heap: list[tuple[int, int, int]] = []
        self._entries: dict[int, tuple[int, int, int]] = {}

    def __contains__(self, block: object) -> bool:
        return block in self._entries

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def add(self, block: int, num_hits: int) -> None:
        self._count += 1
        entry = self._entries[block] = (self._clock + 1 + num_hits, self._count, block)
        heapq.heappush(self._heap, entry)

    def remove(self, block: int) -> None:
        del self._entries[block]
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def peek(self) -> int:
        while self._heap:
            entry = self._heap[0]
            if self._entries.get(entry[2]) is entry:
                return entry[2]
            heapq.heappop(self._heap)
        raise KeyError("no block is cached")

    def pop(self) -> int:
        block = self.peek()
        del self._entries[block]
        self._clock = heapq.heappop(self._heap)[0]
        return block


EVICTIONS: dict[str, type[LeastRecentlyUsed] | type[GreedyDual]] = {"lru": LeastRecentlyUsed, "cost": GreedyDual}
