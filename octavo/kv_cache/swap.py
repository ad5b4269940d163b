"""The host tier: blocks of groups that are swapped out, and how groups move there and back.

It holds swapped groups only: nothing there is shared between groups or found by content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from octavo.core.arithmetic import num_blocks_for
from octavo.core.sequence import Sequence
from octavo.core.step import BlockCopy
from octavo.kv_cache.allocation import Allocation, AllocStatus
from octavo.kv_cache.block_pool import NULL_BLOCK, BlockPool, release_table


class SwapSpace:
    """`pool`: blocks of the host. `tables`: those of swapped sequences, by sequence id.

    `device` and `device_tables` are the block manager's; `at_once` says how many of a sequence's blocks are needed at
    the same time (sliding window).
    """

    def __init__(
        self,
        pool: BlockPool,
        device: BlockPool,
        device_tables: dict[int, list[int]],
        block_size: int,
        at_once: Callable[[int], int],
    ) -> None:
        self.pool = pool
        self.tables: dict[int, list[int]] = {}
        self._device = device
        self._device_tables = device_tables
        self._block_size = block_size
        self._at_once = at_once

    def num_computed_blocks(self, sequences: Iterable[Sequence]) -> int:
        """Different device blocks that hold the computed tokens of these sequences: what a swap moves."""
        size = self._block_size
        blocks = {b for s in sequences for b in self._device_tables[s.seq_id][: -(-s.num_computed_tokens // size)]}
        return len(blocks - {NULL_BLOCK})

    def can_swap_out(self, sequences: Iterable[Sequence]) -> Allocation:
        """Has the host tier room for the sequences' computed blocks? OK or LATER."""
        required, free = self.num_computed_blocks(sequences), self.pool.num_free_blocks
        if required > free:
            return Allocation(AllocStatus.LATER, f"needs {required} host blocks, {free} are free")
        return Allocation(AllocStatus.OK)

    def swap_out(self, sequences: Iterable[Sequence]) -> list[BlockCopy]:
        """Move the sequences' computed blocks to the host, each once; who shared a block shares its new place.

        The copies (device block, host block) are to be made before anything else writes to the device blocks.
        """
        places: dict[int, int] = {}
        for sequence in sequences:
            table = self._device_tables.pop(sequence.seq_id)
            num_computed = -(-sequence.num_computed_tokens // self._block_size)
            self.tables[sequence.seq_id] = _moved(table[:num_computed], self.pool, places)
            release_table(self._device, table)
        return [BlockCopy(block, place) for block, place in places.items()]

    def num_blocks_to_swap_in(self, sequences: Iterable[Sequence], num_lookahead: int = 0) -> int:
        """Device blocks that the sequences need to compute their known tokens, with `num_lookahead` slots more each:
        what was swapped out, new ones at the end, and a copy for each writer but one of a shared block."""
        size = self._block_size
        distinct: set[int] = set()
        writers: set[int] = set()
        num_more = 0
        for sequence in sequences:
            table = self.tables[sequence.seq_id]
            num_unseen = table.count(NULL_BLOCK)
            distinct.update(table[num_unseen:])
            num_live = self._at_once(num_blocks_for(len(sequence.token_ids) + num_lookahead, size) - num_unseen)
            num_more += max(0, num_live - (len(table) - num_unseen))
            for block in table[sequence.num_computed_tokens // size :]:
                num_more += block in writers
                writers.add(block)
        return len(distinct) + num_more

    def can_swap_in(self, sequences: Iterable[Sequence], num_kept: int, num_lookahead: int) -> Allocation:
        """May the sequences come back, when `num_kept` blocks are to stay free?"""
        required = self.num_blocks_to_swap_in(sequences, num_lookahead)
        if required > self._device.num_blocks:
            return Allocation(
                AllocStatus.NEVER, f"needs {required} KV blocks, the pool has {self._device.num_blocks} in all"
            )
        free = self._device.num_free_blocks
        if free - required < num_kept:
            return Allocation(
                AllocStatus.LATER, f"needs {required} free KV blocks, {free} are free, {num_kept} stay free"
            )
        return Allocation(AllocStatus.OK)

    def swap_in(self, sequences: Iterable[Sequence]) -> list[BlockCopy]:
        """Move the sequences' blocks back to the device, each once. The copies are (host block, device block)."""
        places: dict[int, int] = {}
        for sequence in sequences:
            table = self.tables.pop(sequence.seq_id)
            self._device_tables[sequence.seq_id] = _moved(table, self._device, places)
            # they are new blocks: what the index knows are others, or none
            sequence.num_published_blocks = 0
            release_table(self.pool, table)
        return [BlockCopy(block, place) for block, place in places.items()]


def _moved(table: list[int], pool: BlockPool, places: dict[int, int]) -> list[int]:
    """The table of a sequence that moves to `pool`; `places` says where each block went, and grows."""
    moved = []
    for block in table:
        if block == NULL_BLOCK:
            moved.append(NULL_BLOCK)
            continue
        if block in places:
            pool.acquire(places[block])
        else:
            places[block] = pool.allocate()
        moved.append(places[block])
    return moved
