"""Sums about blocks."""

from __future__ import annotations

import pytest

from octavo.core.arithmetic import max_blocks_of_group, num_blocks_for, num_blocks_touched


def test_a_block_that_is_partly_full_counts() -> None:
    assert [num_blocks_for(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "n", "blocks"),
    [
        (16, 1, 1, 1),  # the only token drawn is never written
        (16, 2, 1, 2),
        (20, 13, 1, 2),
        (20, 13, 3, 1 + 3 * 1),  # one full block shared, one tail each
        (20, 14, 3, 1 + 3 * 2),
        (32, 1, 2, 2),
        (32, 2, 2, 2 + 2),
    ],
)
def test_a_group_needs_its_prompt_once_and_each_tail(prompt: int, max_tokens: int, n: int, blocks: int) -> None:
    assert max_blocks_of_group(prompt, max_tokens, n, 16) == blocks


def test_tokens_in_a_row_touch_one_block_more_than_they_fill() -> None:
    for block_size in (1, 2, 5):
        for count in range(1, 20):
            most = max(len({(first + i) // block_size for i in range(count)}) for first in range(block_size))
            assert num_blocks_touched(count, block_size) == most


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "n", "blocks"),
    [
        (16, 1, 1, 1),
        (1000, 500, 1, 5),  # 50 tokens touch five blocks
        (1000, 1, 3, 5 + 3 * 1),
        (1000, 500, 3, 3 * 5),  # none holds more, whatever they share
    ],
)
def test_a_window_bounds_what_each_sequence_holds(prompt: int, max_tokens: int, n: int, blocks: int) -> None:
    assert max_blocks_of_group(prompt, max_tokens, n, 16, max_live_tokens=50) == blocks
