"""`GET /kv/events`: which blocks enter and leave the prefix caches, for external routers. Blocks are named by digests
that are chained from the secret namespace of a key: without the secret nobody can compute them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from itertools import pairwise
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request

from octavo.core.block_events import BlockEvent, BlockEvents
from octavo.errors import InvalidRequest
from octavo.server.context import MOST_KV_READERS, ServerContext
from octavo.server.errors import ApiError
from octavo.server.live_feed import reports
from octavo.server.sending import EventStream

POLL_S: Final = 0.1
"""Most seconds between a step and the sending of its events."""
IDLE_POLL_S: Final = 1.0
"""Most seconds until an event without a step is sent: a reset, or a restart of a replica."""
_MOST_DIGESTS: Final = 256
"""Digests of one event."""
_MOST_STARTS: Final = 512
"""Replicas in the id of an event."""


class AfterQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """`GET /kv/events`."""

    after: Annotated[str, Meta(description="the id of the last event that the reader has")] = ""


class KvEvent(Struct, frozen=True, omit_defaults=True):
    """Data of an event of `GET /kv/events`. `stored` and `removed` name blocks of one cache group by their digests;
    `cleared` comes first of a replica: all its earlier events are void.

    sequence: the number of the event in its replica; of several blocks it is that of the last. time: Unix seconds.
    parent: the digest of the block before the first one, or the root of its chain; the blocks follow one another.
    num_tokens: of all the blocks; the last block of a prompt may be partly filled.
    """

    kind: Literal["stored", "removed", "cleared"]
    sequence: int
    time: float
    replica: int
    cache_group: int | None = None
    digests: list[str] = []
    parent: str | None = None
    block_size: int | None = None
    num_tokens: int = 0


async def stream(context: ServerContext, request: Request) -> EventStream:
    """Stream what enters and leaves the prefix caches. Raises ApiError and InvalidRequest."""
    if not context.llm.config.observability.enable_kv_events:
        raise ApiError(404, "KV events are off; start the server with --enable-kv-events", code="kv_events_off")
    cursor = EventCursor(context.llm.ready.cache.block_size, _position(request))
    return EventStream(_events(context, cursor), context.open_requests)


async def _events(context: ServerContext, cursor: EventCursor) -> AsyncGenerator[bytes, None]:
    if context.kv_readers.locked():
        message = f"{MOST_KV_READERS} clients read the KV events already, the most; close one of them first"
        raise ApiError(429, message, code="too_many_readers")
    async with context.kv_readers:
        yield b": KV events\n\n"
        while not context.open_requests.is_closing:
            stats, polled_at = context.llm.stats, time.monotonic()
            for event in cursor.take(await reports(context.llm, "kv_events", cursor.position, BlockEvents)):
                yield event
            while context.llm.stats.num_steps == stats.num_steps and time.monotonic() - polled_at < IDLE_POLL_S:
                await asyncio.sleep(POLL_S)


def _position(request: Request) -> list[int]:
    """Return the position from which a reader goes on: the id of the last event that it has, from a header or the URL.
    Raises InvalidRequest."""
    query: AfterQuery = request.state.query
    asked = request.headers.get("last-event-id") or query.after
    parts = [part.split("-") for part in asked.split(",")] if asked else []
    numbers = [number for part in parts for number in part]
    is_id = all(len(part) == 2 for part in parts) and all(each.isdecimal() and len(each) < 19 for each in numbers)
    if not is_id or len(parts) > _MOST_STARTS:
        raise InvalidRequest(
            "after (or Last-Event-ID) is not the id of an event; leave it out to begin with what is cached now",
            field="after",
        )
    return [int(number) for number in numbers]


class EventCursor:
    """How far a client has read the events of all replicas."""

    def __init__(self, block_size: int, position: Sequence[int]) -> None:
        self._block_size = block_size
        numbers = iter(position)
        self._read = dict(zip(numbers, numbers, strict=True))
        self._starts: dict[int, int] = {}

    @property
    def position(self) -> list[int]:
        """Return the id of each engine start, followed by the number of the last event of it that the client has."""
        return [number for pair in self._read.items() for number in pair]

    def take(self, replies: Sequence[BlockEvents]) -> Iterator[bytes]:
        """Yield the events in the replies of all running replicas that the client does not have yet."""
        for replica in self._starts.keys() - {reply.replica for reply in replies}:
            self._read.pop(self._starts.pop(replica), None)
            yield self._sent(KvEvent("cleared", 0, time.time(), replica))
        for reply in replies:
            before = self._starts.get(reply.replica)
            if before != reply.start:
                self._read.pop(before or 0, None)
                self._starts[reply.replica] = reply.start
            if reply.is_reset:
                self._read[reply.start] = 0
                yield self._sent(KvEvent("cleared", 0, time.time(), reply.replica))
            for events in _joined(reply.events):
                self._read[reply.start] = events[-1].sequence
                yield self._sent(self._event(events, reply.replica))
            self._read[reply.start] = reply.sequence

    def _event(self, events: Sequence[BlockEvent], replica: int) -> KvEvent:
        first, last = events[0], events[-1]
        return KvEvent(
            "removed" if first.parent is None else "stored",
            last.sequence,
            last.time,
            replica,
            first.group,
            [event.digest.hex() for event in events],
            None if first.parent is None else first.parent.hex(),
            self._block_size,
            sum(event.num_tokens for event in events),
        )

    def _sent(self, event: KvEvent) -> bytes:
        name = ",".join(f"{start}-{sequence}" for start, sequence in self._read.items())
        return b"id: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(event))


def _joined(events: Sequence[BlockEvent]) -> Iterator[Sequence[BlockEvent]]:
    """Yield events of one kind and cache group together: blocks of a prefix one behind the other, or removals."""
    first = 0
    for i, (before, event) in enumerate(pairwise(events), 1):
        follows = before.parent is None if event.parent is None else event.parent == before.digest
        if not follows or event.group != before.group or i - first == _MOST_DIGESTS:
            yield events[first:i]
            first = i
    if events:
        yield events[first:]
