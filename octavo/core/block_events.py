"""Numbered events of a core's prefix index, as they are sent to the front."""

from __future__ import annotations

from typing import Annotated, Literal

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


class KvEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The value of `kv_events_config`, with vLLM's names and defaults.

    endpoint: of the first replica; where it has `*` or `::`, or begins with `ipc://`, the engine listens there,
    otherwise it connects to a subscriber that does. replay_endpoint: where it listens for requests of what a subscriber
    has missed. topic: the first frame of each message. buffer_steps: batches that are kept for the replay.
    hwm: batches that wait for each subscriber. max_queue_size: events that wait to be sent.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: Annotated[int, msgspec.Meta(ge=0, le=10_000_000)] = 10_000
    hwm: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 100_000
    max_queue_size: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 100_000
    topic: str = ""

    @property
    def is_on(self) -> bool:
        """Return whether events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"
