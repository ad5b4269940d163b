"""Groups that wait, in the order of a key: push, peek and pop; a removed entry is skipped when it surfaces."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from octavo.core.sequence import SequenceGroup

_Entry = tuple[tuple[Any, ...], int, SequenceGroup]
"""Its key, a number that is unique, and the group."""


class WaitingQueue:
    """A heap of groups. `key` gives a group's place, smallest first; it is read when the group is pushed."""

    def __init__(self, key: Callable[[SequenceGroup], tuple[Any, ...]]) -> None:
        self._key = key
        self._heap: list[_Entry] = []
        self._entries: dict[str, _Entry] = {}
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, group: SequenceGroup) -> None:
        self._num_pushed += 1
        entry = self._entries[group.request_id] = self._key(group), self._num_pushed, group
        heapq.heappush(self._heap, entry)

    def put_back(self, group: SequenceGroup) -> None:
        """The same: a group's place does not depend on how often it has been here."""
        self.push(group)

    def __contains__(self, group: SequenceGroup) -> bool:
        return group.request_id in self._entries

    def peek(self, now: float = 0.0) -> SequenceGroup | None:
        """The first group, or None. The order does not depend on `now`."""
        while self._heap:
            group = self._heap[0][2]
            if self._entries.get(group.request_id) is self._heap[0]:
                return group
            heapq.heappop(self._heap)
        return None

    def pop(self, now: float = 0.0) -> SequenceGroup:
        """Remove and answer the first group. IndexError when there is none."""
        group = self.peek()
        if group is None:
            raise IndexError("pop from an empty queue")
        heapq.heappop(self._heap)
        del self._entries[group.request_id]
        return group

    def set_aside(self, now: float = 0.0) -> SequenceGroup:
        """The same: nothing depends on whether a group comes back."""
        return self.pop(now)

    def remove(self, group: SequenceGroup) -> None:
        """Take a group out, wherever it stands. KeyError when it is not in."""
        del self._entries[group.request_id]
        if len(self._heap) > 2 * len(self._entries) + 8:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)
