"""What the block manager answers: may blocks be had, what is in the cache already, how a table grew."""

from __future__ import annotations

import enum
from typing import NamedTuple

from octavo.core.step import BlockCopy
from octavo.kv_cache.block_pool import NULL_BLOCK


class AllocStatus(enum.Enum):
    """OK: now. LATER: when others have finished. NEVER: not even alone."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class Allocation(NamedTuple):
    """May blocks be had? With the reason in words (empty for OK), and for LATER how many more would have to be free."""

    status: AllocStatus
    because: str = ""
    num_missing: int = 0


class PrefixHit(NamedTuple):
    """Leading blocks that are in the cache already, and the digest of the first that is not (None: none is missing).

    Blocks that the token behind them does not see (sliding window) are null blocks, cached or not.
    `partial`: a cached block that begins like the next one, and how many tokens are the same: they are copied instead
    of computed. `because` says in words why it is not more.
    """

    blocks: list[int]
    missing: bytes | None = None
    partial: tuple[int, int] = (0, 0)
    because: str = ""

    @property
    def num_unseen(self) -> int:
        """Leading blocks that are not needed."""
        return self.blocks.count(NULL_BLOCK)


class Growth(NamedTuple):
    """How a block table changed: from entry `first_index` on it now holds `blocks`; `copies` come before writing."""

    first_index: int
    blocks: list[int]
    copies: list[BlockCopy]


UNCHANGED = Growth(0, [], [])
NO_HIT = PrefixHit([])
