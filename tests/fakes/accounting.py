"""Proofs that what the scheduler and the block manager have counted agrees. Each raises AssertionError."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from octavo.core.sequence import Sequence, SequenceStatus
from octavo.kv_cache.block_manager import BlockManager
from octavo.kv_cache.block_pool import NULL_BLOCK, BlockPool
from octavo.kv_cache.pins import Pins
from octavo.scheduler.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler) -> None:
    """Prove that queues, groups and blocks agree."""
    registry = scheduler._registry
    groups = registry.groups.values()
    in_swapped = [s for g in groups if g.status is SequenceStatus.SWAPPED for s in g.live]
    check_blocks(registry.block_manager, registry.sequences_on_device(), in_swapped)
    assert len(registry.on_device) + len(registry.waiting) + len(registry.held) + len(registry.swapped) == len(groups)
    assert [g.arrival for g in registry.running] == sorted(g.arrival for g in registry.running)
    assert registry.num_running_sequences == sum(g.max_running_sequences for g in registry.on_device)
    assert {s.seq_id for g in groups for s in g.sequences} == set(registry._by_sequence)


def check_blocks(manager: BlockManager, running: Iterable[Sequence], swapped: Iterable[Sequence] = ()) -> None:
    """Prove that exactly these sequences hold blocks on the device and on the host, and the counts of all pools."""
    for sequences, is_on_host in ((running, False), (swapped, True)):
        tables = {
            seq_id: table.blocks
            for seq_id, table in manager.tables.items()
            if table.blocks and table.is_on_host is is_on_host
        }
        assert {sequence.seq_id for sequence in sequences} == tables.keys(), "others have blocks than should"
        for cache in manager.groups:
            pool = cache.host_pool if is_on_host else cache.pool
            others = [*manager.pins.blocks_of(cache.index), *manager.holds.blocks_of(cache.index)]
            _check_tables(pool, [blocks[cache.index] for blocks in tables.values()], () if is_on_host else others)
    check_pins(manager.pins)


def check_pins(pins: Pins) -> None:
    """Prove that exactly what is pinned and cached is held."""
    wanted = Counter(digest for pin in pins._pins.values() for digest in pin.digests)
    assert wanted == pins._num_pins, "pins and their counts differ"
    assert len(wanted) <= pins._max_blocks, "more blocks are pinned than may be"
    for pool, blocks, most in zip(pins._pools, pins._blocks, pins._most_held, strict=True):
        found = {digest: pool.find(digest) for digest in wanted}
        cached = {digest: block for digest, block in found.items() if block is not None}
        assert blocks == cached or (len(blocks) == most and blocks.items() < cached.items()), (
            "something is pinned and cached but not held, or held but not pinned"
        )


def _check_tables(pool: BlockPool, tables: Iterable[list[int]], others: Iterable[int]) -> None:
    """Prove that no table has a gap or a block twice, and that the pool counts as many users of each block as tables
    and `others` use it."""
    counts = Counter(others)
    for whole in tables:
        table = whole[whole.count(NULL_BLOCK) :]
        assert NULL_BLOCK not in table, "a table has a gap"
        assert len(set(table)) == len(table), "a table holds a block twice"
        counts.update(table)
    check_pool(pool, counts)


def check_pool(pool: BlockPool, expected_counts: dict[int, int]) -> None:
    """Prove the accounting of a pool against the users' own count of each block."""
    counts = [0] * len(pool._counts)
    for block, want in expected_counts.items():
        counts[block] = want
    assert counts[0] == 0, "a table holds the null block"
    if counts != pool._counts:
        assert pool._counts[0] == 0, "the null block is in use"
        for block, (have, want) in enumerate(zip(pool._counts, counts, strict=True)):
            assert have == want, f"block {block} has count {have}, its users are {want}"
    # sets, not loops over all blocks: tests ask after each step
    empty, cached = set(pool._empty), set(pool._cached)
    free = empty | cached
    assert len(free) == len(pool._empty) + len(cached) == pool.num_free_blocks, "a block is free twice, or not counted"
    used = {block for block, count in expected_counts.items() if count}
    assert free == set(range(1, len(counts))) - used, "free lists and counts differ"
    contents = {block: pool._contents[block] for block in pool._index.values()}
    digests = [None if content is None else content.digest for content in contents.values()]
    num_contents = len(pool._contents) - pool._contents.count(None)
    assert (digests, len(contents)) == (list(pool._index), num_contents), "the prefix index is wrong"
    assert {(content.parent, block) for block, content in contents.items() if content is not None} == {
        (parent, block) for parent, blocks in pool._after.items() for block in blocks
    }, "the index of successors is wrong"
    assert empty.isdisjoint(contents), "an empty block has content"
    assert cached <= contents.keys(), "a cached block has no content"
