"""Blocks that stay used after their sequence, until what still reads or writes them has ended."""

from __future__ import annotations

from octavo.core.sequence import Sequence
from octavo.kv_cache.allocation import PrefixHit
from octavo.kv_cache.block_manager import BlockManager
from tests.fakes.block_manager import make_manager


def allocate(manager: BlockManager, num_tokens: int, seq_id: int = 1) -> Sequence:
    sequence = Sequence(seq_id, 0, list(range(num_tokens)), num_tokens)
    manager.allocate(sequence, num_tokens, PrefixHit())
    return sequence


def test_blocks_that_a_step_reads_are_free_when_it_has_returned() -> None:
    manager = make_manager()
    first, second = allocate(manager, 9), allocate(manager, 4, seq_id=2)
    manager.free_after_step(first, step_id=7)
    manager.free_after_step(second, step_id=8)
    manager.check([])
    assert manager.num_used_blocks == 4
    assert not manager.reset_prefix_cache()
    manager.note_returned(6)
    assert manager.num_used_blocks == 4
    manager.note_returned(7)
    assert manager.num_used_blocks == 1
    manager.note_returned(8)
    manager.note_returned(8)
    assert manager.num_used_blocks == 0
    assert manager.reset_prefix_cache()


def test_blocks_of_a_fetch_stay_used_until_it_has_ended() -> None:
    manager = make_manager()
    sequence = allocate(manager, 14)
    table = manager.block_ids(sequence)[0]
    assert manager.begin_fetch(3, sequence, 1, 2) == [table[1:3]]
    manager.free(sequence)
    manager.check([])
    assert manager.num_used_blocks == 2
    assert manager.end_fetch(3) == 12
    assert manager.num_used_blocks == 0
