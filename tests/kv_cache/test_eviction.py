"""Orders of eviction by themselves; what they mean for blocks is in test_block_pool.py."""

from __future__ import annotations

import pytest

from octavo.kv_cache.eviction import EVICTIONS, GreedyDual, LeastRecentlyUsed, SpareFirst


@pytest.mark.parametrize("name", EVICTIONS)
def test_among_equals_the_first_to_be_released_goes_first(name: str) -> None:
    eviction = EVICTIONS[name]()
    for block in (3, 1, 2):
        eviction.add(block, 0)
    eviction.remove(1)
    assert (1 in eviction, 2 in eviction) == (False, True)
    assert [eviction.pop(), eviction.pop()] == [3, 2]
    with pytest.raises(KeyError):
        eviction.pop()


def test_by_cost_a_block_that_comes_again_has_its_new_worth() -> None:
    eviction = GreedyDual()
    eviction.add(1, 0)
    eviction.add(2, 0)
    eviction.remove(1)
    eviction.add(1, 5)
    assert [eviction.pop(), eviction.pop()] == [2, 1]


def test_by_cost_blocks_that_are_used_again_and_again_take_no_room() -> None:
    eviction = GreedyDual()
    for _ in range(1000):
        eviction.add(1, 0)
        eviction.remove(1)
    assert len(eviction._heap) < 100


def test_spare_blocks_are_evicted_before_others() -> None:
    order = SpareFirst(LeastRecentlyUsed())
    order.add(1, 0)
    for block in (2, 3, 4):
        order.add_spare(block)
    order.add(5, 0)
    order.remove(3)
    assert (3 in order, 4 in order, 5 in order) == (False, True, True)
    assert [order.pop() for _ in range(4)] == [2, 4, 1, 5]
