"""Where the KV of a prefix comes from when the local pools do not have it: another engine, a disk, a remote cache.

The local pools are looked up first. A source is asked for the blocks behind their hit, by the digests of
`octavo.kv_cache.block_hash`. What it supplies is written into blocks of the request, which computes nothing until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Fetch(NamedTuple):
    """Blocks that a source is to write.

    block_ids: for each cache group the block of each digest; 0, the null block, for one that its layers do not read.
    """

    fetch_id: int
    digests: list[bytes]
    block_ids: list[list[int]]


class PrefixSource(Protocol):
    """Supplies blocks by content. Every method returns at once; blocks are written in the background."""

    def find(self, digests: Sequence[bytes]) -> int:
        """Return how many leading blocks of these the source has; called for each attempt to admit a request."""
        ...

    def fetch(self, fetch: Fetch) -> None:
        """Begin to write the blocks. They are kept for that until `take_fetched` returns the id, also when the request
        ends before."""
        ...

    def take_fetched(self) -> list[tuple[int, bool]]:
        """Return the ids of the fetches that have ended since the last call, and whether all of their blocks hold what
        they should. Those that failed are computed instead. Called before each step is planned."""
        ...
