"""Blocks that a window of tokens needs: prefixes that are found, blocks that are let go, tables with null blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.sequence import Sequence, SequenceGroup
from octavo.core.step import BlockCopy
from octavo.kv_cache.allocation import PrefixHit
from octavo.kv_cache.block_manager import BlockManager
from octavo.kv_cache.retention import SlidingWindow
from tests.fakes.accounting import check_blocks
from tests.fakes.block_manager import make_manager, only, table
from tests.fakes.engine import make_request

BLOCK = 4


def window_manager(num_blocks: int = 16, max_live_tokens: int | None = 13, host: int = 0) -> BlockManager:
    return make_manager(num_blocks, BLOCK, num_host_blocks=host, window=6, max_live_tokens=max_live_tokens)


def computed(manager: BlockManager, num_tokens: int, seq_id: int = 1) -> tuple[SequenceGroup, Sequence]:
    """A sequence of `num_tokens` tokens, all computed, that has let go of what it no longer sees."""
    group = SequenceGroup(make_request("owner", range(num_tokens)), 0, seq_id)
    sequence = group.live[0]
    manager.allocate(sequence, num_tokens, PrefixHit())
    for end in range(1, num_tokens + 1):
        assert manager.append_slots(sequence, end - 1, end) is not None
        sequence.num_computed_tokens = end
        manager.publish(sequence, group.request.cache_key)
        manager.release_unseen([sequence])
    return group, sequence


@given(
    window=st.integers(1, 30),
    block_size=st.integers(1, 8),
    cached=st.lists(st.booleans(), max_size=40),
)
def test_the_longest_prefix_that_may_go_on_is_found(window: int, block_size: int, cached: list[bool]) -> None:
    digests = [bytes([i]) for i in range(len(cached))]
    asked: list[bytes] = []

    def find(digest: bytes) -> int | None:
        asked.append(digest)
        return digest[0] + 1 if cached[digest[0]] else None

    found = SlidingWindow(window, block_size, None).find_prefix(digests, find)

    def seen(end: int) -> range:
        """Blocks that the token behind `end` blocks sees; the last one at least."""
        return range(min(max(0, end * block_size - window + 1) // block_size, end - 1), end)

    longest = max((end for end in range(1, len(cached) + 1) if all(cached[i] for i in seen(end))), default=0)
    assert found == [i + 1 if i in seen(longest) else 0 for i in range(longest)]
    assert len(set(asked)) == len(asked)


def test_blocks_go_when_their_last_token_leaves_the_window() -> None:
    manager = window_manager()
    _, sequence = computed(manager, 9)
    # the last token may be computed again: at position 8 it sees 3, 4, … 8
    assert table(manager, sequence).count(0) == 0
    sequence.token_ids += [0, 0]
    for end in (10, 11):
        sequence.num_computed_tokens = end
        manager.release_unseen([sequence])
        assert table(manager, sequence).count(0) == (1 if end - 1 - 6 + 1 >= BLOCK else 0)
    check_blocks(manager, [sequence])


def test_what_was_let_go_stays_findable_until_its_block_is_needed() -> None:
    manager = window_manager(num_blocks=8)
    _, sequence = computed(manager, 24)
    assert [block == 0 for block in table(manager, sequence)] == [True] * 4 + [False] * 2
    again = SequenceGroup(make_request("again", range(9)), 1, 2)
    assert len(manager.find_prefix(again, again.live[0], 9).blocks[0]) == 2
    # the head goes first
    others = Sequence(3, 0, [99] * 12, 12)
    manager.allocate(others, 12, PrefixHit())
    assert only(manager).pool.find(manager.digests(sequence)[0]) is None
    assert only(manager).pool.find(manager.digests(sequence)[1]) is not None
    check_blocks(manager, [sequence, others])


def test_admission_asks_for_what_is_held_at_once() -> None:
    # 13 tokens touch four blocks
    manager = window_manager(num_blocks=4)
    group = SequenceGroup(make_request("long", range(100)), 0, 1)
    assert manager.shortage(group, PrefixHit(), waive_watermark=True) is None
    manager.allocate(group.live[0], 100, PrefixHit())
    assert len(table(manager, group.live[0])) == 4
    whole = window_manager(num_blocks=4, max_live_tokens=None)
    with pytest.raises(AssertionError, match="does not fit alone"):
        whole.shortage(group, PrefixHit(), waive_watermark=True)


def test_a_hit_costs_the_blocks_that_are_seen() -> None:
    manager = window_manager(num_blocks=16)
    _, owner = computed(manager, 40)
    manager.free(owner)
    group = SequenceGroup(make_request("again", range(48)), 1, 2)
    hit = manager.find_prefix(group, group.live[0], 48)
    assert (len(hit.blocks[0]), hit.num_unseen(0)) == (10, 8)
    manager.allocate(group.live[0], 48, hit)
    assert hit.num_tokens == 40
    assert only(manager).pool.num_used_blocks == 4
    check_blocks(manager, [group.live[0]])


def test_forks_and_copies_leave_null_blocks_alone() -> None:
    manager = window_manager()
    _, parent = computed(manager, 22)
    child = parent.fork(2, 1)
    manager.fork(parent, child)
    assert table(manager, child) == table(manager, parent)
    shared = table(manager, parent)[-1]
    growth = manager.append_slots(child, 22, 23)
    assert growth is not None
    assert growth.copies == [BlockCopy(shared, growth.changes[0].block_ids[0])]
    check_blocks(manager, [parent, child])
    assert manager.num_blocks_used_by_others([parent]) == 1  # those that both see, up to the one that was copied
    manager.free(parent)
    manager.free(child)
    assert only(manager).pool.num_used_blocks == 0


def test_only_what_is_seen_is_swapped_out_and_in() -> None:
    manager = window_manager(host=4)
    group, sequence = computed(manager, 26)
    assert manager.swap_space.num_computed_blocks([sequence])[0] == 2
    sequence.pause(26)
    out = manager.swap_out([sequence])
    assert len(out) == 2
    assert 0 not in {copy.source for copy in out} | {copy.target for copy in out}
    check_blocks(manager, [], [sequence])
    assert manager.swap_space.num_blocks_to_swap_in([sequence]) == [2]
    back = manager.swap_in([sequence])
    assert sorted(copy.source for copy in back) == sorted(copy.target for copy in out)
    assert table(manager, sequence).count(0) == 5
    manager.publish(sequence, group.request.cache_key)
    check_blocks(manager, [sequence])
    manager.free(sequence)
    assert only(manager).host_pool.num_used_blocks == 0
