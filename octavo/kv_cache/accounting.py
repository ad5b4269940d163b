"""Checks over the block tables of many sequences: who else uses a block, and whether all counts agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from octavo.kv_cache.block_pool import NULL_BLOCK, BlockPool


def num_leading_shared(pool: BlockPool, tables: list[list[int]]) -> int:
    """Count the leading blocks of the first table that sequences outside `tables` use as well; null blocks of a
    sliding window are passed over."""
    count = 0
    for place, block in enumerate(tables[0]):
        if block == NULL_BLOCK:
            continue
        if pool.num_users(block) <= sum(len(table) > place and table[place] == block for table in tables):
            break
        count += 1
    return count


def check_tables(pool: BlockPool, tables: Iterable[list[int]], others: Iterable[int] = ()) -> None:
    """Raise AssertionError unless no table has a gap or a block twice, and the pool counts as many users of each block
    as tables and `others` use it."""
    counts = Counter(others)
    for whole in tables:
        table = whole[whole.count(NULL_BLOCK) :]
        assert NULL_BLOCK not in table, "a table has a gap"
        assert len(set(table)) == len(table), "a table holds a block twice"
        counts.update(table)
    pool.check(counts)
