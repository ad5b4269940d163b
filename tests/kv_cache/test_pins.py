"""Content that is held, now or from when it is there. What that does to requests is in test_block_manager.py."""

from __future__ import annotations

import pytest

from octavo.core.cache_limits import GroupLimits
from octavo.kv_cache.block_pool import BlockPool
from octavo.kv_cache.group_cache import GroupCache
from octavo.kv_cache.pins import Pins
from tests.fakes.accounting import check_pins, check_pool
from tests.fakes.block_manager import cached


def group(num_blocks: int, index: int = 0) -> GroupCache:
    limits = GroupLimits(num_blocks=num_blocks)
    return GroupCache(index, limits, 4, watermark=0, eviction="lru")


def checked(pool: BlockPool, pins: Pins) -> None:
    check_pins(pins)
    check_pool(pool, dict.fromkeys(pins.blocks_of(0), 1))


def test_what_is_cached_is_held_at_once_and_the_rest_when_it_comes() -> None:
    cache = group(6)
    pool = cache.pool
    first = cached(pool, b"1")
    pins = Pins([cache])
    assert pins.pin_digests([b"1", b"12"], until=5.0) == 2
    assert (pins.blocks_of(0), pins.num_held([b"1", b"12"])) == ([first], 1)
    second = cached(pool, b"12")
    with pytest.raises(AssertionError, match="not held"):
        check_pins(pins)
    pins.hold(b"12")
    pins.hold(b"13")  # nobody wants it
    assert (pins.blocks_of(0), pins.num_held([b"1", b"12"])) == ([first, second], 2)
    checked(pool, pins)


def test_there_is_room_for_so_many_different_blocks() -> None:
    cache = group(6)
    pool = cache.pool
    pins = Pins([cache])
    assert pins.pin_digests([b"1", b"12"], until=5.0) == 2
    assert pins.pin_digests([b"1", b"12", b"123", b"1234"], until=6.0) == 3
    assert pins.pin_digests([b"2"], until=7.0) == 0
    assert len(pins) == 2
    assert pins.unpin_digests([b"1", b"12", b"123", b"1234"])  # by its whole name, of which only a part was kept
    assert pins.pin_digests([b"2"], until=7.0) == 1
    checked(pool, pins)


def test_what_two_pins_hold_is_let_go_by_the_last() -> None:
    cache = group(6)
    pool = cache.pool
    cached(pool, b"1")
    pins = Pins([cache])
    pins.pin_digests([b"1"], until=5.0)
    pins.pin_digests([b"1", b"12"], until=6.0)
    assert pool.num_used_blocks == 1
    pins.expire(5.0)
    assert (len(pins), pool.num_used_blocks) == (1, 1)
    pins.expire(6.0)
    assert (len(pins), pool.num_used_blocks) == (0, 0)
    checked(pool, pins)


def test_the_tail_is_let_go_before_its_head() -> None:
    cache = group(4)
    pool = cache.pool
    head, tail = cached(pool, b"1"), cached(pool, b"12")
    pins = Pins([cache])
    pins.pin_digests([b"1", b"12"], until=5.0)
    assert pins.clear() == 2
    assert [pool.allocate() for _ in range(4)][2:] == [tail, head]


def test_nothing_is_a_prefix_that_cannot_be_pinned() -> None:
    pins = Pins([group(2)])
    assert pins.pin_digests([], until=5.0) == 0
    assert not pins.unpin_digests([])
    assert pins.clear() == 0


def test_a_prefix_is_held_where_every_group_has_it() -> None:
    caches = [group(6), group(4, 1)]
    pools = [cache.pool for cache in caches]
    cached(pools[0], b"1")
    cached(pools[0], b"12")
    pins = Pins(caches)
    assert pins.pin_digests([b"1", b"12"], until=5.0) == 2
    assert (pins.num_blocks, pins.num_held([b"1", b"12"])) == (2, 0)
    cached(pools[1], b"1")
    pins.hold(b"1")
    assert (pins.num_blocks, pins.num_held([b"1", b"12"])) == (3, 1)
    check_pins(pins)
    assert pins.clear() == 3
    assert [pool.num_used_blocks for pool in pools] == [0, 0]
