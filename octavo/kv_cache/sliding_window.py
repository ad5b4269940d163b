"""Which blocks of a sequence a model needs in which every layer sees the last tokens only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.core.arithmetic import num_blocks_touched


class SlidingWindow:
    """`num_tokens`: tokens that a query sees, itself included. `max_live_tokens`: most tokens of one sequence that are
    in blocks at once (`SchedulerConfig.max_live_tokens`); None where a step may compute any number."""

    def __init__(self, num_tokens: int, block_size: int, max_live_tokens: int | None) -> None:
        self.num_tokens = num_tokens
        self.max_live_tokens = max_live_tokens
        self._block_size = block_size
        self._max_live_blocks = None if max_live_tokens is None else num_blocks_touched(max_live_tokens, block_size)

    def num_unseen_blocks(self, position: int) -> int:
        """Leading blocks of which the token at `position`, and every later one, sees nothing."""
        return max(0, position - self.num_tokens + 1) // self._block_size

    def at_once(self, num_blocks: int) -> int:
        """How many of `num_blocks` blocks in a row a sequence holds at once, at most."""
        return num_blocks if self._max_live_blocks is None else min(num_blocks, self._max_live_blocks)

    def find_prefix(self, digests: Sequence[bytes], find: Callable[[bytes], int | None]) -> list[int]:
        """Blocks of the longest prefix of `digests` behind which a sequence may go on: all that its next token sees are
        cached. The others are 0, the null block. Every digest is looked up once at most, most of them never."""
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
