"""Results of the block manager: which blocks are missing, what is in the cache already, how a table changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octavo.core.step import BlockCopy, TableChange
from octavo.kv_cache.block_pool import NULL_BLOCK


class Shortage(NamedTuple):
    """Why blocks cannot be allocated before other requests have finished, and how many more blocks of each cache group
    would have to be free."""

    because: str
    num_missing: tuple[int, ...]


def shortage_of_all(shortages: Sequence[Shortage | None]) -> Shortage | None:
    """Return the shortage in all cache groups from that in each; None where there is none."""
    first = next((each for each in shortages if each is not None), None)
    if first is None:
        return None
    return first._replace(num_missing=tuple(0 if each is None else each.num_missing[0] for each in shortages))


class PrefixHit(NamedTuple):
    """Leading blocks that are in the cache already.

    blocks: for each cache group; blocks that the token behind them does not read are null blocks, cached or not. Of
        groups that hold an encoder's output all its blocks, or none.
    num_block_tokens: the tokens in them.
    missing: the digest of the first block that is not cached; None where none is missing.
    sources: for each cache group a block that begins like the next one; its first `num_copied_tokens` tokens are copied
        instead of computed. Empty where there is none.
    because: why it is not more, in words.
    num_parted: leading blocks of which only states are missing; 0 where they are not.
    num_encoded_blocks: those that encoders' outputs take, cached or not.
    """

    blocks: Sequence[list[int]] = ()
    num_block_tokens: int = 0
    missing: bytes | None = None
    sources: Sequence[int] = ()
    num_copied_tokens: int = 0
    because: str = ""
    num_parted: int = 0
    num_encoded_blocks: int = 0

    @property
    def num_blocks(self) -> int:
        """The number of leading blocks, including those that are not needed."""
        return len(self.blocks[0]) if self.blocks else 0

    @property
    def num_tokens(self) -> int:
        """The number of tokens that need not be computed."""
        return self.num_block_tokens + self.num_copied_tokens

    def blocks_of(self, group: int) -> list[int]:
        """Return the blocks of one cache group."""
        return self.blocks[group] if self.blocks else []

    def num_unseen(self, group: int) -> int:
        """Return how many leading blocks of one cache group are not needed."""
        return self.blocks_of(group).count(NULL_BLOCK)

    def without_copy(self, because: str) -> PrefixHit:
        """Return this hit with nothing copied."""
        return self._replace(sources=(), num_copied_tokens=0, because=because)


class SlotGrowth(NamedTuple):
    """How the tables of a sequence changed so that tokens can be written; `copies` come before the writing."""

    changes: list[TableChange]
    copies: list[BlockCopy]


UNCHANGED = SlotGrowth([], [])
