from __future__ import annotations

import numpy as np

from octavo.worker.block_table import BlockTables


def lines_of(tables: BlockTables, lines: list[int], width: int) -> list[list[int]]:
    found = np.full((len(lines), tables.width), -1, dtype=np.int32)
    tables.gather(np.array(lines), out=found)
    assert not found[:, width:].any()
    return found[:, :width].tolist()


def test_entries_behind_the_end_are_the_null_block() -> None:
    tables = BlockTables(2, 4)
    line = tables.acquire([5, 6, 7])
    tables.write(line, 1, [9])
    assert lines_of(tables, [line], 4) == [[5, 9, 0, 0]]


def test_a_released_line_is_clean_when_it_is_used_again() -> None:
    tables = BlockTables(1, 4)
    line = tables.acquire([1, 2, 3, 4])
    tables.release(line)
    assert tables.acquire([8]) == line
    assert lines_of(tables, [line], 4) == [[8, 0, 0, 0]]


def test_tables_grow_in_both_directions_and_keep_what_they_hold() -> None:
    tables = BlockTables(1, 2)
    lines = [tables.acquire([i + 1]) for i in range(5)]
    tables.write(lines[2], 1, list(range(10, 19)))
    assert sorted(set(lines)) == sorted(lines)
    assert lines_of(tables, lines[:3], 10) == [
        [1] + [0] * 9,
        [2] + [0] * 9,
        [3, *range(10, 19)],
    ]
    assert tables.blocks_at(np.array([lines[2], lines[4]]), np.array([9, 0])).tolist() == [18, 5]
