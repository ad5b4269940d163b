"""Groups that wait, in the order of a key: push, peek and pop; a removed group is skipped when it surfaces."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from octavo.core.sequence import SequenceGroup


class WaitingQueue:
    """A heap of groups. `key` gives a group's place, smallest first; it is read when the group is pushed."""

    def __init__(self, key: Callable[[SequenceGroup], tuple[Any, ...]]) -> None:
        self._key = key
        self._heap: list[tuple[tuple[Any, ...], int, SequenceGroup]] = []
        self._members: dict[str, SequenceGroup] = {}
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._members)

    def push(self, group: SequenceGroup) -> None:
        self._num_pushed += 1
        self._members[group.request_id] = group
        heapq.heappush(self._heap, (self._key(group), self._num_pushed, group))

    def __contains__(self, group: SequenceGroup) -> bool:
        return self._members.get(group.request_id) is group

    def peek(self, now: float = 0.0) -> SequenceGroup | None:
        """The first group, or None. The order does not depend on `now`."""
        while self._heap:
            group = self._heap[0][2]
            if self._members.get(group.request_id) is group:
                return group
            heapq.heappop(self._heap)
        return None

    def pop(self, now: float = 0.0) -> SequenceGroup:
        """Remove and answer the first group. IndexError when there is none."""
        group = self.peek()
        if group is None:
            raise IndexError("pop from an empty queue")
        heapq.heappop(self._heap)
        del self._members[group.request_id]
        return group

    def remove(self, group: SequenceGroup) -> None:
        """Take a group out, wherever it stands. KeyError when it is not in."""
        del self._members[group.request_id]
        if len(self._heap) > 2 * len(self._members) + 8:
            self._heap = [entry for entry in self._heap if self._members.get(entry[2].request_id) is entry[2]]
            heapq.heapify(self._heap)
