"""What of a sequence goes to the host and comes back; whole runs are in tests/scheduler/test_preemption.py."""

from __future__ import annotations

from octavo.core.cache_key import PLAIN
from octavo.core.sequence import Sequence, SequenceGroup
from octavo.kv_cache.allocation import NO_HIT, AllocStatus
from octavo.kv_cache.block_manager import BlockManager
from tests.fakes.engine import make_request


def forked(manager: BlockManager, num_tokens: int, num_sequences: int) -> list[Sequence]:
    """Sequences that share all blocks of their prompt, and have drawn a token each that is not computed."""
    first = Sequence(0, 0, list(range(num_tokens)), num_tokens)
    manager.allocate(first, num_tokens, NO_HIT)
    first.num_computed_tokens = num_tokens
    sequences = [first]
    for number in range(1, num_sequences):
        sequences.append(first.fork(number, number))
        manager.fork(first, sequences[-1])
    for sequence in sequences:
        sequence.token_ids.append(40 + sequence.index)
    return sequences


def make_manager(num_host_blocks: int = 8) -> BlockManager:
    return BlockManager(8, 4, 0.0, enable_prefix_caching=False, num_host_blocks=num_host_blocks)


def test_a_shared_block_moves_once_and_its_next_writers_copy_it() -> None:
    manager = make_manager()
    sequences = forked(manager, 6, 3)
    assert manager.swap_space.num_computed_blocks(sequences) == 2
    assert len(manager.swap_out(sequences)) == 2
    assert manager.pool.num_used_blocks == 0
    # the whole block, the shared one, and a copy of that for two of three
    assert manager.swap_space.num_blocks_to_swap_in(sequences) == 4
    assert len(manager.swap_in(sequences)) == 2
    assert manager.host_pool.num_used_blocks == 0
    manager.check(sequences)
    for sequence in sequences:
        assert manager.append_slots(sequence, 6, 7) is not None
    assert manager.pool.num_used_blocks == 4


def test_blocks_beyond_what_is_computed_stay_behind_and_are_counted_for_the_way_back() -> None:
    manager = make_manager()
    sequence = Sequence(0, 0, list(range(10)), 10)
    manager.allocate(sequence, 10, NO_HIT)
    sequence.num_computed_tokens = 4
    assert len(manager.swap_out([sequence])) == 1
    assert manager.swap_space.num_blocks_to_swap_in([sequence]) == 3
    assert manager.swap_space.num_blocks_to_swap_in([sequence], num_lookahead=3) == 4


def test_the_last_free_blocks_are_enough() -> None:
    manager = make_manager(num_host_blocks=2)
    sequences = forked(manager, 6, 2)
    assert manager.swap_space.can_swap_out(sequences).status is AllocStatus.OK
    manager.swap_out(sequences)
    other = Sequence(9, 0, list(range(20)), 20)
    manager.allocate(other, 20, NO_HIT)
    assert manager.can_swap_in(sequences, waive_watermark=True).status is AllocStatus.OK
    later = manager.can_swap_in(sequences, waive_watermark=True, num_lookahead=2)
    assert (later.status, later.because) == (AllocStatus.LATER, "needs 5 free KV blocks, 3 are free, 0 stay free")


def test_the_watermark_counts_for_who_comes_back_unless_it_is_waived() -> None:
    manager = BlockManager(10, 4, 0.3, enable_prefix_caching=False, num_host_blocks=8)
    sequence, other = Sequence(1, 0, list(range(16)), 16), Sequence(2, 0, list(range(16)), 16)
    for each in (sequence, other):
        manager.allocate(each, 16, NO_HIT)
        each.num_computed_tokens = 16
    manager.swap_out([sequence])
    answer = manager.can_swap_in([sequence], waive_watermark=False)
    assert (answer.status, answer.because) == (AllocStatus.LATER, "needs 4 free KV blocks, 6 are free, 3 stay free")
    assert manager.can_swap_in([sequence], waive_watermark=True).status is AllocStatus.OK
    # lookahead slots: a block more for each sequence
    assert manager.can_swap_in([sequence], waive_watermark=True, num_lookahead=9).status is AllocStatus.LATER


def test_what_comes_back_is_found_again() -> None:
    manager = BlockManager(3, 4, 0.0, enable_prefix_caching=True, num_host_blocks=8)
    group = SequenceGroup(make_request("r", range(9)), 0, 1)
    sequence = group.live[0]
    manager.allocate(sequence, 9, NO_HIT)
    sequence.num_computed_tokens = 8
    manager.publish(sequence, PLAIN)
    manager.swap_out([sequence])
    thief = Sequence(2, 0, list(range(90, 102)), 12)
    manager.allocate(thief, 12, NO_HIT)
    manager.free(thief)
    manager.swap_in([sequence])
    manager.publish(sequence, PLAIN)
    other = SequenceGroup(make_request("other", range(9)), 1, 3)
    assert manager.find_prefix(other, other.live[0], 9).blocks == manager.table(sequence)[:2]
