"""Blocks that are not free yet although no sequence needs them: something still reads or writes them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from octavo.kv_cache.block_pool import NULL_BLOCK, BlockPool


class BlockHolds:
    """Keeps blocks of the cache groups' pools until an event: a step was planned, a fetch or a transfer has ended."""

    def __init__(self, pools: Sequence[BlockPool]) -> None:
        self._pools = pools
        self._held: dict[Hashable, list[tuple[int, int]]] = {}

    def hold(self, event: Hashable, blocks: Iterable[Iterable[int]]) -> None:
        """Keep the blocks of each cache group, which are used or cached, until `event`; null blocks are passed over."""
        for group, ids in enumerate(blocks):
            for block in ids:
                if block != NULL_BLOCK:
                    self._pools[group].acquire(block)
                    self._held.setdefault(event, []).append((group, block))

    def hold_found(self, event: Hashable, digest: bytes, is_needed: Iterable[bool]) -> list[int] | None:
        """Keep the block with this content in each cache group that needs it until `event`, and return their ids, null
        blocks for the other groups. Returns None, with nothing changed, where one is missing."""
        found = [pool.find(digest) if each else 0 for pool, each in zip(self._pools, is_needed, strict=True)]
        blocks = [block for block in found if block is not None]
        if len(blocks) < len(found):
            return None
        self.hold(event, [[block] for block in blocks])
        return blocks

    def end(self, event: Hashable) -> None:
        """Release the blocks that are kept until `event`, the last first; nothing happens where there are none."""
        for group, block in reversed(self._held.pop(event, ())):
            self._pools[group].release(block)

    def __len__(self) -> int:
        return len(self._held)

    def blocks_of(self, group: int) -> list[int]:
        """Return the blocks of a cache group that are kept, each as often as it is kept."""
        return [block for held in self._held.values() for each, block in held if each == group]
