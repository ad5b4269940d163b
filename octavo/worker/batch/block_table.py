"""Holds the block tables of all sequences in one array, so that a step gathers them without a loop."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class BlockTables:
    """Each sequence has a line of the array, empty at first. Entries behind a table's end are 0, the null block.

    The array grows by doubling, so views of it are valid only until the next `write`.
    """

    def __init__(self, num_lines: int = 16, width: int = 16) -> None:
        self._blocks = np.zeros((num_lines, width), dtype=np.int32)
        self._lengths = [0] * num_lines

    def write(self, line: int, first: int, block_ids: Sequence[int]) -> None:
        """Set the table of `line` to `block_ids` from entry `first` on; it ends after them."""
        end = first + len(block_ids)
        while line >= len(self._lengths):
            self._blocks = np.concatenate((self._blocks, np.zeros_like(self._blocks)))
            self._lengths += [0] * len(self._lengths)
        assert first <= self._lengths[line], "a block table has no gaps"
        while end > self._blocks.shape[1]:
            self._blocks = np.concatenate((self._blocks, np.zeros_like(self._blocks)), axis=1)
        self._blocks[line, first:end] = block_ids
        self._blocks[line, end : self._lengths[line]] = 0
        self._lengths[line] = end

    @property
    def width(self) -> int:
        """Number of entries of a line, used or not."""
        return self._blocks.shape[1]

    def gather(self, lines: NDArray[np.int64], out: NDArray[np.int32]) -> None:
        """Copy these lines to `out`, [lines, width]."""
        # any mode but the default writes to `out` at once
        self._blocks.take(lines, axis=0, out=out, mode="clip")

    def leading(self, lines: NDArray[np.int64], count: int) -> NDArray[np.int32]:
        """Return the first `count` entries of these lines, [lines, count]; zeros where they are shorter."""
        return self._blocks[lines, :count]

    def blocks_at(self, lines: NDArray[np.int64], entries: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return entry `entries[i]` of line `lines[i]`, int32; 0 behind all tables, where no guess has a state."""
        if (is_there := entries < self.width).all():
            return self._blocks[lines, entries]
        return np.where(is_there, self._blocks[lines, np.where(is_there, entries, 0)], 0)
