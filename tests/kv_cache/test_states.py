"""Blocks that hold states: which a sequence keeps, which are found later, and which prefix may be continued."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.cache_limits import LIVE_STATES, CacheLimits, GroupLimits
from octavo.core.sequence import Sequence, SequenceGroup
from octavo.core.step import BlockCopy
from octavo.kv_cache.allocation import PrefixHit
from octavo.kv_cache.block_manager import BlockManager
from octavo.kv_cache.retention import States
from tests.fakes.accounting import check_blocks
from tests.fakes.engine import make_request

BLOCK = 4


def state_manager(num_states: int = 16, num_blocks: int = 64, host: int = 0, snapshot_tokens: int = 16) -> BlockManager:
    """Layers that keep all tokens, and layers that keep states."""
    groups = (
        GroupLimits(num_blocks=num_blocks, num_host_blocks=host),
        GroupLimits(num_blocks=num_states, num_host_blocks=host, max_live_tokens=LIVE_STATES, is_state=True),
    )
    return BlockManager(CacheLimits(block_size=BLOCK, groups=groups), snapshot_tokens=snapshot_tokens)


def states(manager: BlockManager, sequence: Sequence) -> list[int]:
    """The entries of its states that have a block."""
    return [i for i, block in enumerate(manager.block_ids(sequence)[1]) if block]


def found(manager: BlockManager, sequence: Sequence) -> list[int]:
    """The numbers of leading blocks behind which a state is found."""
    return [i for i, each in enumerate(manager.digests(sequence), 1) if manager.groups[1].pool.find(each) is not None]


def compute(manager: BlockManager, group: SequenceGroup, ends: list[int]) -> Sequence:
    """Compute the first sequence of a group up to each of these positions in one row."""
    sequence = group.live[0]
    if sequence.seq_id not in manager.tables or not manager.block_ids(sequence):
        num_tokens = len(sequence.token_ids)
        hit = manager.find_prefix(group, sequence, num_tokens)
        manager.allocate(sequence, num_tokens, hit)
        sequence.num_computed_tokens = hit.num_tokens
    for end in ends:
        assert manager.append_slots(sequence, sequence.num_computed_tokens, end) is not None
        sequence.num_computed_tokens = end
        manager.publish(sequence, group.request.cache_key)
        manager.release_unseen([sequence])
    return sequence


def request(tokens: range | list[int], seq_id: int = 1) -> SequenceGroup:
    return SequenceGroup(make_request(f"r{seq_id}", tokens), seq_id, seq_id)


@given(cached=st.lists(st.booleans(), max_size=20))
def test_a_prefix_goes_on_behind_the_last_state_that_is_cached(cached: list[bool]) -> None:
    digests = [bytes([i]) for i in range(len(cached))]
    found = States(BLOCK).find_prefix(digests, lambda digest: digest[0] + 1 if cached[digest[0]] else None)
    longest = max((i for i, is_cached in enumerate(cached, 1) if is_cached), default=0)
    assert found == [0] * (longest - 1) + [longest] * bool(longest)


def test_a_sequence_keeps_its_last_state_and_snapshots_are_released_behind_it() -> None:
    manager = state_manager()
    sequence = compute(manager, request(range(43)), [43])
    assert states(manager, sequence) == [10]
    assert manager.groups[1].pool.num_used_blocks == 1
    check_blocks(manager, [sequence])
    # every 16 tokens, and the last full block before the last token of the prompt
    assert found(manager, sequence) == [4, 8, 10]


@pytest.mark.parametrize("ends", [[43], [5, 6, 7, 8, 20, 31, 43], list(range(1, 44))])
def test_snapshots_are_those_of_any_cut_that_writes_them(ends: list[int]) -> None:
    manager = state_manager()
    assert found(manager, compute(manager, request(range(43)), ends)) == [4, 8, 10]


def test_states_that_are_no_snapshots_are_given_out_first() -> None:
    manager = state_manager(num_states=4, snapshot_tokens=0)
    sequence = compute(manager, request(range(9)), [9])
    assert found(manager, sequence) == [2]
    sequence.token_ids += range(100, 140)
    for end in range(10, 48):
        assert manager.append_slots(sequence, end - 1, end) is not None
        sequence.num_computed_tokens = end
        manager.release_unseen([sequence])
    assert found(manager, sequence) == [2]


def test_the_state_behind_a_prefix_whose_keys_were_evicted_is_evicted_before_older_ones() -> None:
    manager = state_manager()
    sequence = compute(manager, request(range(43)), [43])
    digests, (keys, kept) = manager.digests(sequence), (group.pool for group in manager.groups)
    assert found(manager, sequence) == [4, 8, 10]
    manager.free(sequence)
    while keys.find(digests[9]) is not None:
        keys.give_up()
    kept.give_up()
    # nothing could find the state behind block 10, though it was used last
    assert [i for i, each in enumerate(digests, 1) if kept.find(each) is not None] == [4, 8]
    check_blocks(manager, [])


def test_a_prompt_that_parts_from_another_leaves_a_snapshot_there_for_the_next() -> None:
    manager = state_manager(snapshot_tokens=0)
    manager.free(compute(manager, request([*range(20), *[90] * 20]), [40]))
    second = request([*range(20), *[91] * 20], 2)
    hit = manager.find_prefix(second, second.live[0], 40)
    assert (hit.num_tokens, hit.num_parted) == (0, 5)
    assert hit.because == "recurrent layers have no snapshot between tokens 0 and 20"
    manager.free(compute(manager, second, [40]))
    third = request([*range(20), *[92] * 20], 3)
    assert manager.find_prefix(third, third.live[0], 40).num_tokens == 20


def test_nothing_is_copied_from_the_beginning_of_a_block() -> None:
    manager = state_manager()
    manager.free(compute(manager, request(range(12)), [12]))
    again = request([*range(10), 90, 91, 92], 2)
    hit = manager.find_prefix(again, again.live[0], 13)
    assert (hit.num_tokens, list(hit.sources)) == (8, [])


def test_the_state_that_a_hit_starts_from_is_read_only() -> None:
    manager = state_manager()
    first = compute(manager, request(range(17)), [16])
    snapshot = manager.block_ids(first)[1][3]
    again = compute(manager, request([*range(16), 90, 91], 2), [])
    assert manager.block_ids(again)[1] == [0, 0, 0, snapshot]
    growth = manager.append_slots(again, 16, 18)
    assert growth is not None
    assert growth.copies == []
    assert manager.block_ids(again)[1][3] == snapshot
    assert manager.block_ids(again)[1][4] not in (0, snapshot)


def test_a_fork_copies_the_state_in_the_middle_of_a_block_and_shares_one_at_its_end() -> None:
    for num_tokens, is_copied in ((10, True), (12, False)):
        manager = state_manager()
        parent = compute(manager, request(range(num_tokens)), [num_tokens])
        child = parent.fork(2, 1)
        manager.fork(parent, child)
        shared = manager.block_ids(parent)[1][-1]
        growth = manager.append_slots(child, num_tokens, num_tokens + 1)
        assert growth is not None
        copies = [copy for copy in growth.copies if copy.group == 1]
        assert copies == ([BlockCopy(shared, manager.block_ids(child)[1][-1], 1)] if is_copied else [])
        assert manager.block_ids(parent)[1][-1] == shared


def test_a_swapped_sequence_takes_its_last_state_along() -> None:
    manager = state_manager(host=16)
    sequence = compute(manager, request(range(30)), [22])
    sequence.pause(22)
    out = manager.swap_out([sequence])
    assert [copy.group for copy in out].count(1) == 1
    check_blocks(manager, [], [sequence])
    manager.swap_in([sequence])
    assert states(manager, sequence) == [5]
    check_blocks(manager, [sequence])


def test_snapshots_leave_a_block_for_each_other_sequence() -> None:
    manager = state_manager(num_states=4, snapshot_tokens=4)
    others = [compute(manager, request([90 + i] * 2, 2 + i), [2]) for i in range(2)]
    sequence = compute(manager, request(range(30)), [])
    assert manager.append_slots(sequence, 0, 30) is not None
    assert manager.groups[1].pool.num_free_blocks == 1
    assert states(manager, sequence) == [7]
    assert all(manager.append_slots(other, 2, 3) is not None for other in others)


def test_a_pin_has_a_snapshot_at_its_end() -> None:
    manager = state_manager(snapshot_tokens=0)
    tokens = list(range(24))
    assert manager.pins.pin(tokens[:12], request(tokens).request.cache_key, 1e9).num_cached_tokens == 0
    sequence = compute(manager, request(tokens), [24])
    assert found(manager, sequence) == [3, 5]
    assert manager.pins.pin(tokens[:12], request(tokens).request.cache_key, 1e9).num_cached_tokens == 12
    manager.free(sequence)
    check_blocks(manager, [])


def test_what_the_full_layers_have_lost_goes_first_among_states() -> None:
    manager = state_manager(num_states=6, num_blocks=8, snapshot_tokens=0)
    manager.free(compute(manager, request([1] * 9), [9]))
    manager.free(compute(manager, request([2] * 9, 2), [9]))
    pool = manager.groups[0].pool
    for _ in range(6):
        pool.allocate()  # the blocks of the first prompt
    states = manager.groups[1].pool
    newer, older = (manager_digest(tokens) for tokens in ([2] * 9, [1] * 9))
    assert states.find(older) is not None
    states._cached.remove(states.find(older) or 0)
    states._cached.add(states.find(older) or 0, 0)  # used last: by its age it would go last
    manager._demote(older)
    for _ in range(5):
        states.allocate()
    assert (states.find(older), states.find(newer) is not None) == (None, True)


def manager_digest(tokens: list[int]) -> bytes:
    """The name of the second block of these tokens."""
    manager = state_manager()
    group = request(tokens)
    manager.find_prefix(group, group.live[0], len(tokens))
    return manager.digests(group.live[0])[1]


def test_a_sequence_that_has_nothing_is_allocated_no_state() -> None:
    manager = state_manager()
    sequence = request(range(30)).live[0]
    manager.allocate(sequence, 30, PrefixHit())
    assert manager.groups[1].pool.num_used_blocks == 0
