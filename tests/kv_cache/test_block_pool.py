"""Blocks are given out, shared, cached and evicted in the stated order."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo.kv_cache.block_pool import BlockPool, CachedBytes, Content
from octavo.kv_cache.eviction import GreedyDual, LeastRecentlyUsed
from tests.fakes.accounting import check_pool


def named(digest: bytes, parent: bytes = b"root", token_ids: tuple[int, ...] = ()) -> Content:
    return Content(digest, parent, token_ids)


def cached(pool: BlockPool, *digests: bytes) -> list[int]:
    """Blocks with these contents, which nobody uses any more, in this order."""
    blocks = [pool.allocate() for _ in digests]
    for block, digest in zip(blocks, digests, strict=True):
        pool.publish(block, named(digest))
        pool.release(block)
    return blocks


def test_the_null_block_is_never_given_out() -> None:
    pool = BlockPool(3)
    assert sorted(pool.allocate() for _ in range(3)) == [1, 2, 3]
    assert pool.num_free_blocks == 0


def test_a_block_is_free_when_its_last_user_has_gone() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.acquire(block)
    pool.release(block)
    assert pool.num_used_blocks == 1
    pool.release(block)
    assert pool.num_used_blocks == 0
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(block)


def test_a_published_block_is_found_after_its_release_and_taken_again() -> None:
    pool = BlockPool(2)
    [block] = cached(pool, b"x")
    assert pool.find(b"x") == block
    assert pool.is_cached(block)
    pool.acquire(block)
    assert not pool.is_cached(block)
    check_pool(pool, {block: 1})


def test_empty_blocks_go_first_then_the_least_recently_released() -> None:
    pool = BlockPool(4)
    a, b, c = (pool.allocate() for _ in range(3))
    for block, digest in ((a, b"a"), (b, b"b"), (c, b"c")):
        pool.publish(block, named(digest))
    for block in (b, a, c):
        pool.release(block)
    assert pool.allocate() == 4
    assert [pool.allocate() for _ in range(3)] == [b, a, c]
    assert pool.find(b"a") is None


def test_touched_empty_blocks_go_before_fresh_ones_whatever_emptied_them() -> None:
    pool = BlockPool(8)
    a, b, c, d = (pool.allocate() for _ in range(4))
    pool.publish(b, named(b"b"))
    pool.publish(c, named(b"c"))
    for block in (a, b, c):
        pool.release(block)
    pool.invalidate(b"c")
    assert {pool.allocate(), pool.allocate()} == {a, c}
    assert pool.find(b"b") == b
    for block in (a, c, d):
        pool.release(block)
    assert pool.reset()
    assert {pool.allocate() for _ in range(4)} == {a, b, c, d}
    assert sorted(pool.empty_blocks()) == [5, 6, 7, 8]


def test_beyond_a_bound_cached_blocks_go_before_fresh_ones() -> None:
    limit = CachedBytes(2 * 10)
    limit.add(pool := BlockPool(8, cached_bytes=limit), 10)
    touched, _ = pool.allocate(), pool.allocate()
    a, b, c = cached(pool, b"a", b"b", b"c")
    pool.release(touched)
    assert [pool.allocate() for _ in range(3)] == [touched, a, 6]  # touched, the third cached one, fresh
    assert [pool.allocate() for _ in range(4)] == [7, 8, b, c]
    assert pool.num_free_blocks == 0


def test_the_bound_is_one_for_all_groups_and_takes_what_weighs_most_by_bytes_and_age() -> None:
    limit = CachedBytes(100)
    small, large = BlockPool(8, cached_bytes=limit), BlockPool(8, cached_bytes=limit)
    limit.add(small, 10)
    limit.add(large, 60)

    cached(large, b"A")
    oldest, *_ = cached(small, b"a", b"b", b"c", b"d", b"e")
    taken = small.allocate()  # 110 bytes are cached: A weighs 60 · 6, a weighs 10 · 5
    assert large.find(b"A") is None
    assert small.find(b"a") == oldest != taken
    cached(large, b"B")
    assert small.allocate() == oldest  # B weighs 60 · 1, a weighs 10 · 6: of equals the own one goes
    assert large.find(b"B") is not None


def test_among_equals_the_longest_prefix_is_evicted_first() -> None:
    pool = BlockPool(3)
    table = [pool.allocate() for _ in range(3)]
    for block, digest in zip(table, (b"1", b"12", b"123"), strict=True):
        pool.publish(block, named(digest))
    for block in reversed(table):  # as a sequence releases its table
        pool.release(block)
    pool.allocate()
    assert [pool.find(digest) is not None for digest in (b"1", b"12", b"123")] == [True, True, False]


def test_the_first_block_with_a_content_keeps_its_name() -> None:
    pool = BlockPool(2)
    a, b = pool.allocate(), pool.allocate()
    pool.publish(a, named(b"x"))
    pool.publish(b, named(b"x"))
    assert pool.find(b"x") == a
    pool.release(b)
    check_pool(pool, {a: 1})


def test_reset_forgets_content_but_only_when_nothing_is_used() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.publish(block, named(b"x"))
    assert not pool.reset()
    assert pool.find(b"x") == block
    pool.release(block)
    assert pool.reset()
    assert pool.find(b"x") is None
    assert pool.num_free_blocks == 2
    check_pool(pool, {})


def test_check_sees_a_wrong_count() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    with pytest.raises(AssertionError, match=f"block {block} has count 1, its users are 0"):
        check_pool(pool, {})


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda pool: pool._empty.append(pool._empty[0]), "a block is free twice"),
        (lambda pool: pool._cached.pop(), "a block is free twice, or not counted"),
        (lambda pool: (pool._cached.pop(), pool._cached.add(1, 0)), "free lists and counts differ"),
        (lambda pool: pool._index.update(other=1), "the prefix index is wrong"),
        (lambda pool: pool._index.clear(), "the prefix index is wrong"),
        (lambda pool: pool._contents.__setitem__(1, None), "the prefix index is wrong"),
        (lambda pool: pool._after.clear(), "the index of successors is wrong"),
        (lambda pool: pool._empty.__setitem__(0, pool._cached.pop()) or pool._cached.add(4, 0), "has content"),
    ],
)
@pytest.mark.parametrize("eviction", [LeastRecentlyUsed, GreedyDual])
def test_check_sees_what_was_spoilt(
    spoil: Callable[[BlockPool], object], said: str, eviction: type[LeastRecentlyUsed]
) -> None:
    pool = BlockPool(4, eviction())
    used, free = pool.allocate(), pool.allocate()
    for block in (used, free):
        pool.publish(block, named(b"%d" % block))
    pool.release(free)
    check_pool(pool, {used: 1})
    spoil(pool)
    with pytest.raises(AssertionError, match=said):
        check_pool(pool, {used: 1})


def test_the_block_that_begins_most_alike_is_found_among_those_after_a_prefix() -> None:
    pool = BlockPool(4)
    for tokens in ((1, 2, 3, 4), (1, 2, 9, 9), (7, 7, 7, 7)):
        block = pool.allocate()
        pool.publish(block, named(repr(tokens).encode(), b"p", tokens))
    assert pool.find_beginning(b"p", [1, 2, 9, 5]) == (pool.find(b"(1, 2, 9, 9)"), 3)
    assert pool.find_beginning(b"p", [1]) == (pool.find(b"(1, 2, 3, 4)"), 1)
    assert pool.find_beginning(b"p", [5]) == (0, 0)
    assert pool.find_beginning(b"q", [1, 2]) == (0, 0)
    check_pool(pool, {1: 1, 2: 1, 3: 1})


def test_an_evicted_content_is_told_from_one_that_never_was_or_that_came_back() -> None:
    pool = BlockPool(1)
    cached(pool, b"x")
    assert not pool.was_evicted(b"x")
    block = pool.allocate()
    assert pool.was_evicted(b"x")
    assert not pool.was_evicted(b"y")
    pool.release(block)
    cached(pool, b"x")
    assert not pool.was_evicted(b"x")


def test_by_cost_a_new_content_starts_without_the_hits_of_the_old_one() -> None:
    pool = BlockPool(2, GreedyDual())
    first, second = pool.allocate(), pool.allocate()
    pool.publish(first, named(b"first"))
    for _ in range(5):
        pool.note_hit(first)
    pool.invalidate(b"first")
    pool.publish(first, named(b"again"))
    pool.publish(second, named(b"second"))
    pool.release(first)
    pool.release(second)
    assert pool.allocate() == first


def test_by_cost_what_was_found_often_outlives_what_is_new() -> None:
    pool = BlockPool(3, GreedyDual())
    often, once = pool.allocate(), pool.allocate()
    pool.publish(often, named(b"often"))
    pool.publish(once, named(b"once"))
    pool.note_hit(often)
    pool.release(often)
    pool.release(once)
    assert [pool.allocate() for _ in range(2)] == [3, once]
    assert pool.find(b"often") == often


def test_by_cost_what_is_no_longer_asked_for_goes_at_last() -> None:
    pool = BlockPool(2, GreedyDual())
    old = pool.allocate()
    pool.publish(old, named(b"old"))
    for _ in range(3):
        pool.note_hit(old)
    pool.release(old)
    for number in range(8):
        cached(pool, b"%d" % number)
        check_pool(pool, {})
        if pool.find(b"old") is None:
            break
    assert 2 < number < 7


@pytest.mark.parametrize("is_used", [True, False])
def test_what_is_invalidated_is_found_no_more(is_used: bool) -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.publish(block, named(b"a"))
    if not is_used:
        pool.release(block)
    pool.invalidate(b"a")
    pool.invalidate(b"never was")
    assert pool.find(b"a") is None
    check_pool(pool, {block: 1} if is_used else {})
    assert pool.num_free_blocks == (0 if is_used else 1)
