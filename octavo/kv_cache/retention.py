"""Which blocks of a sequence the layers of a cache group need.

A kind of layer is one class here that states how many blocks a sequence of some tokens needs at once, which leading
blocks no later token reads, and which cached prefix a sequence may continue; how many bytes a block has is stated by
the memory plan. A latent keeps all blocks, of another size. A recurrent state keeps the last block alone: one block
at once, all before it unread, and a prefix may be continued behind any block whose state is cached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from octavo.core.arithmetic import num_blocks_touched
from octavo.core.cache_limits import GroupLimits

Find = Callable[[bytes], int | None]
"""Returns the block with the content of a digest, or None."""


class Retention(Protocol):
    """`releases`: whether leading blocks of a sequence become unread while it runs."""

    releases: bool

    def num_unseen_blocks(self, position: int) -> int:
        """Return how many leading blocks neither the token at `position` nor any later one reads."""
        ...

    def at_once(self, num_blocks: int) -> int:
        """Return how many of `num_blocks` consecutive blocks a sequence holds at once, at most."""
        ...

    def find_prefix(self, digests: Sequence[bytes], find: Find) -> list[int]:
        """Return the blocks of the longest prefix of `digests` that a sequence may continue. Blocks that its next token
        does not read are 0, the null block."""
        ...


class KeepAll:
    """Every token reads all tokens before it."""

    releases = False

    def num_unseen_blocks(self, position: int) -> int:
        return 0

    def at_once(self, num_blocks: int) -> int:
        return num_blocks

    def find_prefix(self, digests: Sequence[bytes], find: Find) -> list[int]:
        blocks: list[int] = []
        for digest in digests:
            block = find(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks


class SlidingWindow:
    """Every token reads the last `num_tokens` tokens, itself included. `max_live_tokens`: most tokens of one sequence
    that are in blocks at once (`SchedulerConfig.max_live_tokens`); None where a step may compute any number."""

    releases = True

    def __init__(self, num_tokens: int, block_size: int, max_live_tokens: int | None) -> None:
        self._num_tokens = num_tokens
        self._block_size = block_size
        self._max_live_blocks = None if max_live_tokens is None else num_blocks_touched(max_live_tokens, block_size)

    def num_unseen_blocks(self, position: int) -> int:
        unseen = position - self._num_tokens + 1
        return unseen // self._block_size if unseen > 0 else 0

    def at_once(self, num_blocks: int) -> int:
        return num_blocks if self._max_live_blocks is None else min(num_blocks, self._max_live_blocks)

    def find_prefix(self, digests: Sequence[bytes], find: Find) -> list[int]:
        """Look up each digest at most once, and most of them never."""
        found: dict[int, int] = {}
        end = len(digests)
        while end:
            # at least one, for a token that sees itself alone would take any prefix for known
            first = min(self.num_unseen_blocks(end * self._block_size), end - 1)
            missing = None
            # from the front: whatever is missing, no prefix that is longer can do without it
            for i in range(first, end):
                if i in found:
                    break  # and so are those behind it
                block = find(digests[i])
                if block is None:
                    missing = i
                    break
                found[i] = block
            if missing is None:
                return [0] * first + [found[i] for i in range(first, end)]
            end = missing
        return []


def retention(limits: GroupLimits, block_size: int) -> Retention:
    """Return what the layers of a cache group with these limits keep."""
    if limits.window is None:
        return KeepAll()
    return SlidingWindow(limits.window, block_size, limits.max_live_tokens)
