"""What of a sequence goes to the host and comes back; whole runs are in tests/scheduler/test_preemption.py."""

from __future__ import annotations

import pytest

from octavo.core.cache_key import PLAIN
from octavo.core.sequence import Sequence, SequenceGroup
from octavo.kv_cache.allocation import PrefixHit
from octavo.kv_cache.block_manager import BlockManager
from tests.fakes.accounting import check_blocks
from tests.fakes.block_manager import make_manager, only, table
from tests.fakes.engine import make_request


def forked(manager: BlockManager, num_tokens: int, num_sequences: int) -> list[Sequence]:
    """Sequences that share all blocks of their prompt, and have drawn a token each that is not computed."""
    first = Sequence(0, 0, list(range(num_tokens)), num_tokens)
    manager.allocate(first, num_tokens, PrefixHit())
    first.num_computed_tokens = num_tokens
    sequences = [first]
    for number in range(1, num_sequences):
        sequences.append(first.fork(number, number))
        manager.fork(first, sequences[-1])
    for sequence in sequences:
        sequence.token_ids.append(40 + sequence.index)
    return sequences


def swap_manager(num_host_blocks: int = 8, num_lookahead: int = 0) -> BlockManager:
    return make_manager(8, enable_prefix_caching=False, num_host_blocks=num_host_blocks, num_lookahead=num_lookahead)


def test_a_shared_block_moves_once_and_its_next_writers_copy_it() -> None:
    manager = swap_manager()
    sequences = forked(manager, 6, 3)
    assert manager.swap_space.num_computed_blocks(sequences)[0] == 2
    assert len(manager.swap_out(sequences)) == 2
    assert only(manager).pool.num_used_blocks == 0
    # the whole block, the shared one, and a copy of that for two of three
    assert manager.swap_space.num_blocks_to_swap_in(sequences) == [4]
    assert len(manager.swap_in(sequences)) == 2
    assert only(manager).host_pool.num_used_blocks == 0
    check_blocks(manager, sequences)
    for sequence in sequences:
        assert manager.append_slots(sequence, 6, 7) is not None
    assert only(manager).pool.num_used_blocks == 4


def test_blocks_beyond_what_is_computed_stay_behind_and_are_counted_for_the_way_back() -> None:
    manager = swap_manager()
    sequence = Sequence(0, 0, list(range(10)), 10)
    manager.allocate(sequence, 10, PrefixHit())
    sequence.num_computed_tokens = 4
    assert len(manager.swap_out([sequence])) == 1
    assert manager.swap_space.num_blocks_to_swap_in([sequence]) == [3]


def test_the_last_free_blocks_are_enough() -> None:
    manager = swap_manager(num_host_blocks=2)
    sequences = forked(manager, 6, 2)
    assert manager.swap_space.swap_out_shortage(sequences) is None
    manager.swap_out(sequences)
    other = Sequence(9, 0, list(range(20)), 20)
    manager.allocate(other, 20, PrefixHit())
    assert manager.swap_space.swap_in_shortage(sequences, waive_watermark=True) is None


def test_the_watermark_counts_for_who_comes_back_unless_it_is_waived() -> None:
    manager = make_manager(10, watermark=0.3, enable_prefix_caching=False, num_host_blocks=8)
    sequence, other = Sequence(1, 0, list(range(16)), 16), Sequence(2, 0, list(range(16)), 16)
    for each in (sequence, other):
        manager.allocate(each, 16, PrefixHit())
        each.num_computed_tokens = 16
    manager.swap_out([sequence])
    answer = manager.swap_space.swap_in_shortage([sequence], waive_watermark=False)
    assert answer is not None
    assert answer.because == "needs 4 free KV blocks, 6 are free, 3 stay free"
    assert manager.swap_space.swap_in_shortage([sequence], waive_watermark=True) is None


@pytest.mark.parametrize(("num_lookahead", "num_blocks"), [(0, 3), (2, 5)])
def test_lookahead_slots_are_counted_for_each_sequence(num_lookahead: int, num_blocks: int) -> None:
    manager = swap_manager(num_lookahead=num_lookahead)
    sequences = forked(manager, 6, 2)
    manager.swap_out(sequences)
    assert manager.swap_space.num_blocks_to_swap_in(sequences) == [num_blocks]
    other = Sequence(9, 0, list(range(20)), 20)
    manager.allocate(other, 20, PrefixHit())
    answer = manager.swap_space.swap_in_shortage(sequences, waive_watermark=True)
    assert (answer is None) is (num_blocks <= 3)
    assert num_blocks <= 3 or answer.because == "needs 5 free KV blocks, 3 are free, 0 stay free"


def test_what_comes_back_is_found_again() -> None:
    manager = make_manager(3, num_host_blocks=8)
    group = SequenceGroup(make_request("r", range(9)), 0, 1)
    sequence = group.live[0]
    manager.allocate(sequence, 9, PrefixHit())
    sequence.num_computed_tokens = 8
    manager.publish(sequence, PLAIN)
    manager.swap_out([sequence])
    thief = Sequence(2, 0, list(range(90, 102)), 12)
    manager.allocate(thief, 12, PrefixHit())
    manager.free(thief)
    manager.swap_in([sequence])
    manager.publish(sequence, PLAIN)
    other = SequenceGroup(make_request("other", range(9)), 1, 3)
    assert manager.find_prefix(other, other.live[0], 9).blocks[0] == table(manager, sequence)[:2]
