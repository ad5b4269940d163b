"""Blocks that are not free yet although no sequence needs them: something still reads or writes them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from octavo.kv_cache.block_pool import BlockPool


class BlockHolds:
    """Keeps blocks until an event: a step was planned or has returned, a fetch has ended."""

    def __init__(self) -> None:
        self._held: dict[Hashable, list[tuple[BlockPool, int]]] = {}

    def hold(self, event: Hashable, blocks: Iterable[tuple[BlockPool, int]]) -> None:
        """Keep the blocks, which are used or cached, until `event`."""
        for pool, block in blocks:
            pool.acquire(block)
            self._held.setdefault(event, []).append((pool, block))

    def end(self, event: Hashable) -> None:
        """Release the blocks that are kept until `event`, the last first; nothing happens where there are none."""
        for pool, block in reversed(self._held.pop(event, ())):
            pool.release(block)

    def __len__(self) -> int:
        return len(self._held)

    def blocks_of(self, pool: BlockPool) -> list[int]:
        """Return the blocks of a pool that are kept, as often as they are."""
        return [block for held in self._held.values() for each, block in held if each is pool]
