"""Interfaces to sources of KV that the local pools do not have: another engine, host memory, a disk.

The local pools are looked up first, then a connector for the blocks after their hit, by the digests of
`octavo.kv_cache.block_hash`. It writes into blocks of the request, which computes nothing until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octavo.core.messages import EngineCoreRequest


class Fetch(NamedTuple):
    """Blocks that are to be written for a request.

    block_ids: for each cache group the block of each digest; 0, the null block, for one that its layers do not read.
    """

    fetch_id: int
    request_id: str
    digests: list[bytes]
    block_ids: list[list[int]]


class BlockSource:
    """Supplies blocks by content. Every method returns at once; blocks are written in the background. The thread that
    plans steps calls all methods except `Connector.note`."""

    def added(self, request: EngineCoreRequest, digests: Sequence[bytes]) -> None:
        """Note that a request waits from now on. digests: those of its full blocks and, last, of its tail."""

    def ended(self, request_id: str) -> None:
        """Note that a request has ended, whether it was added or not."""

    def find(self, request: EngineCoreRequest, digests: Sequence[bytes]) -> int:
        """Return how many leading blocks of these the source has or will have; called when a request is admitted, which
        then fetches them. digests: those after its hit in the local pools, the tail last; empty when it needs no
        more."""
        return 0

    def fetch(self, fetch: Fetch) -> None:
        """Begin to write blocks that `find` has promised, not before the next step: earlier steps may still read the
        old content. The blocks are held until the fetch has ended, even if the request ends before."""

    def end_reads(self) -> None:
        """End reads of the local pools by other engines, because a request with no other one running needs the held
        blocks, or because a pause clears the cache."""

    def end_fetches(self) -> None:
        """End fetches of blocks that another engine may not have computed yet, as if they had failed: a paused engine
        computes nothing."""

    @property
    def is_saving(self) -> bool:
        """Whether blocks of the local pools wait to be saved to a tier, or are being saved."""
        return False

    def close(self) -> None:
        """End all threads and connections. Idempotent."""


class Connector(BlockSource):
    """The source from which a scheduler fetches. address: address for other engines that fetch from this one; None
    where they cannot."""

    address: str | None = None

    def take_fetched(self) -> list[tuple[int, str]]:
        """Return the ids of the fetches that have ended since the last call, each with the reason of its failure; ""
        for success. Blocks of failed fetches are computed instead. Called before each step is planned."""
        raise NotImplementedError

    def payload(self, step_id: int, *, has_work: bool) -> bytes | None:
        """Return the commands that the step sends to the ranks (`RankCommands`), None for none. Without
        `has_work` the step is made for the commands alone."""
        raise NotImplementedError

    def note(self, rank: int, payload: bytes) -> None:
        """Note the operations that have ended on a rank (`RankNotes`). Called from any thread."""
        raise NotImplementedError
