"""Blocks that stay used after their sequence, until what still reads or writes them has ended."""

from __future__ import annotations

from octavo.core.cache_key import PLAIN
from tests.fakes.accounting import check_blocks
from tests.fakes.block_manager import allocate, make_manager


def test_blocks_of_a_fetch_stay_used_until_it_has_ended() -> None:
    manager = make_manager()
    sequence = allocate(manager, 14)
    table = manager.block_ids(sequence)[0]
    assert manager.begin_fetch(3, sequence, 1, 2) == [table[1:3]]
    manager.free(sequence)
    check_blocks(manager, [])
    assert manager.num_used_blocks == 2
    assert manager.end_fetch(3) == 12
    assert manager.num_used_blocks == 0


def test_found_blocks_stay_used_until_their_event() -> None:
    manager = make_manager()
    sequence = allocate(manager, 9)
    sequence.num_computed_tokens = 9
    manager.publish(sequence, PLAIN)
    table, digests = manager.block_ids(sequence)[0][:2], manager.digests(sequence)
    assert [manager.holds.hold_found("x", digest, [True]) for digest in digests] == [[block] for block in table]
    assert manager.holds.hold_found("x", b"unknown", [True]) is None
    assert manager.holds.hold_found("x", b"unknown", [False]) == [0]
    manager.free(sequence)
    check_blocks(manager, [])
    assert (manager.num_used_blocks, manager.reset_prefix_cache()) == (2, False)
    manager.holds.end("x")
    check_blocks(manager, [])
    assert manager.num_used_blocks == 0
