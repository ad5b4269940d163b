"""Which blocks of a sequence the layers of a cache group need.

A kind of layer is one class here that states how many blocks a sequence of some tokens needs at once, which leading
blocks no later token reads, and which cached prefix a sequence may continue; how many bytes a block has is stated by
the memory plan. Layers with latents keep all blocks, which have another size. A block of a recurrent state holds the
state after its last token: only the last one is read, and a prefix may be continued behind any block whose state is
cached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.core.arithmetic import num_blocks_touched
from octavo.core.cache_limits import LIVE_STATES, GroupLimits

Find = Callable[[bytes], int | None]
"""Returns the block with the content of a digest, or None."""


class Retention:
    """Every token reads all tokens before it. Other kinds of layers override the methods that differ. name: name of the
    layers in reasons. loss: words of a reason for the missing part of a prefix.
    releases: whether leading blocks of a sequence become unread while it runs.
    is_state: blocks hold states. A row writes its last block, and of the others only those that later look-ups should
    find (snapshots).
    """

    name = "full attention layers"
    loss = "have lost blocks"
    releases = False
    is_state = False

    def num_unseen_blocks(self, position: int) -> int:
        """Return how many leading blocks neither the token at `position` nor any later one reads."""
        return 0

    def at_once(self, num_blocks: int) -> int:
        """Return how many of `num_blocks` consecutive blocks a sequence holds at once, at most."""
        return num_blocks

    def find_prefix(self, digests: Sequence[bytes], find: Find) -> list[int]:
        """Return the blocks of the longest prefix of `digests` that a sequence may continue. Blocks that its next token
        does not read are 0, the null block."""
        blocks: list[int] = []
        for digest in digests:
            block = find(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks


class SlidingWindow(Retention):
    """Every token reads the last `num_tokens` tokens, itself included. `max_live_tokens`: most tokens of one sequence
    that are in blocks at once (`SchedulerConfig.max_live_tokens`); None where a step may compute any number."""

    releases = True

    def __init__(self, num_tokens: int, block_size: int, max_live_tokens: int | None) -> None:
        self.name = f"layers with a window of {num_tokens:,} tokens"
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
            # from the front: a longer prefix needs a missing block, too
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


class States(Retention):
    """Every token reads the state after the token before it, which is in the block of that token."""

    name = "recurrent layers"
    loss = "have no snapshot"
    releases = True
    is_state = True

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def num_unseen_blocks(self, position: int) -> int:
        return (position - 1) // self._block_size if position else 0

    def at_once(self, num_blocks: int) -> int:
        return min(num_blocks, LIVE_STATES)

    def find_prefix(self, digests: Sequence[bytes], find: Find) -> list[int]:
        for i in reversed(range(len(digests))):
            block = find(digests[i])
            if block is not None:
                return [0] * i + [block]
        return []


class Encoding(Retention):
    """Every token reads the keys and values of encoders' outputs, which are in blocks of its request.

    The prefix that a sequence may continue does not depend on them: if they are missing, the encoder computes them
    again.
    """

    name = "cross attention layers"
    loss = "have no encoding"

    def find_prefix(self, digests: Sequence[bytes], find: Find) -> list[int]:
        """Return the blocks with these names where all are cached, else none."""
        blocks = [block for digest in digests if (block := find(digest)) is not None]
        return blocks if len(blocks) == len(digests) else []


def longest_common(
    retentions: Sequence[Retention], finds: Sequence[Find], digests: Sequence[bytes]
) -> tuple[list[list[int]], list[int]]:
    """Return the blocks, for each cache group, of the longest prefix of `digests` that a sequence may continue in all
    of them; and how many leading blocks each group has by itself."""
    wanted, alone = digests, list[int]()
    while True:
        blocks = [each.find_prefix(wanted, find) for each, find in zip(retentions, finds, strict=True)]
        lengths = [*map(len, blocks)]
        alone = alone or lengths
        if min(lengths) == max(lengths):
            return blocks, alone
        wanted = wanted[: min(lengths)]  # a missing block of one group shortens the prefix of the others


def retention_of(limits: GroupLimits, block_size: int) -> Retention:
    """Return the retention of the layers of a cache group with these limits."""
    if limits.is_state:
        return States(block_size)
    if limits.num_encoded:
        return Encoding()
    if limits.window is None:
        return Retention()
    return SlidingWindow(limits.window, block_size, limits.max_live_tokens)
