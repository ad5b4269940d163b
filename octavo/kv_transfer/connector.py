"""Where the KV of a prefix comes from when the local pools do not have it: another engine, the host, a disk.

The local pools are looked up first. A connector is asked for the blocks behind their hit, by the digests of
`octavo.kv_cache.block_hash`. What it supplies is written into blocks of the request, which computes nothing until then.
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
    """Supplies blocks by content. Every method returns at once; blocks are written in the background. One thread, that
    which plans steps, calls all methods but `Connector.note`."""

    def added(self, request: EngineCoreRequest, digests: Sequence[bytes]) -> None:
        """Note that a request waits from now on. digests: those of its tokens, the tail last."""

    def ended(self, request_id: str) -> None:
        """Note that a request has ended, whether it was added or not."""

    def find(self, request: EngineCoreRequest, digests: Sequence[bytes]) -> int:
        """Return how many leading blocks of these are there or will come; called when a request is admitted, which then
        fetches them. digests: those behind its hit in the local pools, the tail last; none when it needs no more."""
        return 0

    def fetch(self, fetch: Fetch) -> None:
        """Begin to write blocks that `find` has promised, with the next step at the earliest: steps before it may read
        what is in them. They are kept until the fetch has ended, also when the request ends before."""

    def end_reads(self) -> None:
        """End what others read of the local pools: they hold what a request needs beside which nothing runs, or what a
        pause forgets."""

    def end_fetches(self) -> None:
        """End fetches whose blocks another engine may not have yet, as if they had failed: a paused one computes
        nothing."""

    @property
    def is_saving(self) -> bool:
        """Whether blocks of the local pools wait to be kept elsewhere, or are being written there."""
        return False

    def close(self) -> None:
        """End all threads and connections. Idempotent."""


class Connector(BlockSource):
    """What a scheduler fetches from. address: where other engines fetch from this one; None where they cannot."""

    address: str | None = None

    def take_fetched(self) -> list[tuple[int, str]]:
        """Return the ids of the fetches that have ended since the last call, each with the reason why not all of its
        blocks hold what they should; that is empty for those that do. The others are computed instead. Called before
        each step is planned."""
        raise NotImplementedError

    def payload(self, step_id: int, *, has_rows: bool) -> bytes | None:
        """Return what the step sends to the ranks (`RankCommands`), None for nothing. Without rows the step is planned
        for it alone."""
        raise NotImplementedError

    def note(self, rank: int, payload: bytes) -> None:
        """Note what has ended on a rank (`RankNotes`). Called from any thread."""
        raise NotImplementedError
