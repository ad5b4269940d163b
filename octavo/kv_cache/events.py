"""What entered and left the prefix index, in the order in which it did, for readers outside the engine.

It keeps the present content of the index, each entry with the number of its event, and the last removals. A reader that
is late or slow gets the present content instead of the events that it missed, so memory is bounded by the cache.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import Final

from octavo.core.block_events import BlockEvent, BlockEvents
from octavo.kv_cache.block_pool import Content

MOST_REMOVED: Final = 1 << 14
"""How many removals are kept for readers."""


class EventLog:
    """A listener of the prefix index that keeps what readers need.

    most_removed: removals that are kept.
    """

    def __init__(self, most_removed: int = MOST_REMOVED, clock: Callable[[], float] = time.time) -> None:
        self._start = int.from_bytes(os.urandom(6), "big")
        self._clock = clock
        self._sequence = 0
        # in the order of their numbers
        self._stored: dict[tuple[int, bytes], BlockEvent] = {}
        self._removed: deque[BlockEvent] = deque()
        self._most_removed = most_removed
        self._forgotten = 0

    def stored(self, group: int, block: int, content: Content) -> None:
        self._sequence += 1
        num_tokens = len(content.token_keys)
        event = BlockEvent(self._sequence, self._clock(), group, content.digest, content.parent, num_tokens)
        self._stored[group, content.digest] = event

    def removed(self, group: int, digest: bytes) -> None:
        self._sequence += 1
        self._stored.pop((group, digest), None)
        self._removed.append(BlockEvent(self._sequence, self._clock(), group, digest))
        if len(self._removed) > self._most_removed:
            self._forgotten = self._removed.popleft().sequence

    def after(self, read: Iterable[int]) -> BlockEvents:
        """Return what a reader lacks. read: starts of engines, each followed by the number of the last event that the
        reader has of it."""
        numbers = iter(read)
        last = dict(zip(numbers, numbers, strict=False)).get(self._start, -1)
        is_reset = last < self._forgotten
        events = list(takewhile(lambda event: event.sequence > last or is_reset, reversed(self._stored.values())))
        if not is_reset:
            events += takewhile(lambda event: event.sequence > last, reversed(self._removed))
        events.sort(key=lambda event: event.sequence)
        return BlockEvents(self._start, self._sequence, is_reset, events)
