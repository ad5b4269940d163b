"""Waiting groups in the order of a key: a heap, in which removed entries stay until they reach the top."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Any

from octavo.core.sequence import SequenceGroup

_Entry = tuple[tuple[Any, ...], int, SequenceGroup]
"""The group's key, a unique number, and the group."""


class WaitingQueue:
    """`key` returns a group's place, smallest first; it is read when the group is pushed."""

    def __init__(self, key: Callable[[SequenceGroup], tuple[Any, ...]]) -> None:
        self._key = key
        self._heap: list[_Entry] = []
        self._entries: dict[str, _Entry] = {}
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[SequenceGroup]:
        """Yield the groups in arbitrary order."""
        return (group for _, _, group in self._entries.values())

    def __contains__(self, group: SequenceGroup) -> bool:
        return group.request_id in self._entries

    def push(self, group: SequenceGroup) -> None:
        self._num_pushed += 1
        entry = self._entries[group.request_id] = self._key(group), self._num_pushed, group
        heapq.heappush(self._heap, entry)

    def peek(self, now: float = 0.0) -> SequenceGroup | None:
        """Return the first group, or None. The order does not depend on `now`."""
        while self._heap:
            group = self._heap[0][2]
            if self._entries.get(group.request_id) is self._heap[0]:
                return group
            heapq.heappop(self._heap)
        return None

    def place(self, now: float = 0.0) -> tuple[Any, ...]:
        """Return the key of the first group. Raises IndexError when the queue is empty."""
        self.peek()
        return self._heap[0][0]

    def remove(self, group: SequenceGroup) -> None:
        """Remove a group from any position. Raises KeyError when it is not in the queue."""
        del self._entries[group.request_id]
        if len(self._heap) > 2 * len(self._entries) + 8:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)
