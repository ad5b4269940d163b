"""Numbered events of a core's prefix index, as they are sent to the front."""

from __future__ import annotations

import msgspec


class BlockEvent(msgspec.Struct, frozen=True, array_like=True):
    """Content entered the index of a cache group, or left it.

    sequence: its number, which grows with each event of an engine. time: in Unix seconds. parent: the name of the
    prefix before it; None of what has left. num_tokens: less than a block has in the last block of a prompt.
    """

    sequence: int
    time: float
    group: int
    digest: bytes
    parent: bytes | None = None
    num_tokens: int = 0


class BlockEvents(msgspec.Struct):
    """Events that a reader lacks, up to number `sequence`.

    start: a random number of the engine's start. is_reset: the reader's last number is of another start, or so old that
    removals after it are no longer kept: it knows nothing, and the events are all that is in the index.
    """

    start: int
    sequence: int
    is_reset: bool
    events: list[BlockEvent]
    replica: int = 0
