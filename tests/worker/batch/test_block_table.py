from __future__ import annotations

import numpy as np

from octavo.worker.batch.block_table import BlockTables


def lines_of(tables: BlockTables, lines: list[int], width: int) -> list[list[int]]:
    found = np.full((len(lines), tables.width), -1, dtype=np.int32)
    tables.gather(np.array(lines), out=found)
    assert not found[:, width:].any()
    return found[:, :width].tolist()


def test_entries_behind_the_end_are_the_null_block() -> None:
    tables = BlockTables(2, 4)
    tables.write(1, 0, [5, 6, 7])
    tables.write(1, 1, [9])
    assert lines_of(tables, [1], 4) == [[5, 9, 0, 0]]
    # guesses may stand behind the widest table of states, which have no entry for them
    assert tables.blocks_at(np.array([1, 1, 1]), np.array([1, 3, 4])).tolist() == [9, 0, 0]


def test_an_emptied_line_is_clean_when_it_is_used_again() -> None:
    tables = BlockTables(1, 4)
    tables.write(0, 0, [1, 2, 3, 4])
    tables.write(0, 0, [])
    tables.write(0, 0, [8])
    assert lines_of(tables, [0], 4) == [[8, 0, 0, 0]]


def test_tables_grow_in_both_directions_and_keep_what_they_hold() -> None:
    tables = BlockTables(1, 2)
    for line in range(5):
        tables.write(line, 0, [line + 1])
    tables.write(2, 1, list(range(10, 19)))
    assert lines_of(tables, [0, 1, 2], 10) == [
        [1] + [0] * 9,
        [2] + [0] * 9,
        [3, *range(10, 19)],
    ]
    assert tables.blocks_at(np.array([2, 4]), np.array([9, 0])).tolist() == [18, 5]
