"""What listeners of the prefix index are called with."""

from __future__ import annotations

import pytest

from octavo.core.cache_limits import CacheLimits, GroupLimits
from octavo.kv_cache.block_manager import BlockManager
from octavo.kv_cache.block_pool import BlockPool, Content
from tests.fakes.engine import make_request, run
from tests.fakes.listener import Mirror
from tests.kv_cache.test_tails import kept_core


def stored(pool: BlockPool, digest: bytes) -> int:
    block = pool.allocate()
    pool.publish(block, Content(digest, b"parent", (1,)))
    return block


def test_what_is_evicted_invalidated_or_reset_is_removed_and_the_same_content_is_stored_once() -> None:
    pool, mirror = BlockPool(3, group=2), Mirror()
    pool.listeners.append(mirror)
    block = stored(pool, b"1")
    pool.release(stored(pool, b"1"))  # another block with the same content
    assert mirror.of(2) == {b"1": block}
    pool.release(block)
    for _ in range(3):
        pool.allocate()
    assert mirror.all_removed == [(2, b"1")]
    for block in (1, 2, 3):
        pool.release(block)
    stored(pool, b"2")
    pool.invalidate(b"2")
    pool.release(stored(pool, b"3"))
    pool.release(stored(pool, b"2"))
    assert not pool.reset()  # a block is used
    assert mirror.all_removed == [(2, b"1"), (2, b"2")]


def test_all_listeners_are_called_and_a_reset_removes_everything_from_every_group() -> None:
    groups = tuple(GroupLimits(num_blocks=8, num_host_blocks=0, block_bytes=1, window=window) for window in (None, 8))
    manager, mirror, other = BlockManager(CacheLimits(block_size=4, groups=groups)), Mirror(), Mirror()
    manager.listeners += [mirror, other]
    for cache in manager.groups:
        cache.pool.release(stored(cache.pool, b"1"))
    assert [[*each.of(group)] for each in (mirror, other) for group in (0, 1)] == [[b"1"]] * 4
    manager.listeners.remove(other)
    assert manager.reset_prefix_cache()
    assert (mirror.all_removed, other.all_removed) == ([(0, b"1"), (1, b"1")], [])


@pytest.mark.parametrize("window", [None, (None, 6)])
def test_blocks_are_stored_before_the_step_that_fills_them_has_run(window: object) -> None:
    core, mirror = kept_core(sliding_window=window), Mirror()
    core.scheduler.block_manager.listeners.append(mirror)
    core.add_request(make_request("a", range(10), max_tokens=1))
    assert core.scheduler.schedule(0.0) is not None
    assert len(mirror.of(0)) == 2


def test_the_mirror_of_a_busy_core_is_its_index() -> None:
    core, mirror = kept_core(num_blocks=12), Mirror()
    core.scheduler.block_manager.listeners.append(mirror)
    run(core, [make_request(str(i), [i % 3, *range(i, i + 13)], max_tokens=6) for i in range(12)])
    mirror.check(core.scheduler.block_manager)
    assert mirror.all_removed
