"""Sums of amounts that are ordered by keys."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from operator import itemgetter
from typing import Any, Final

Key = tuple[Any, ...]

_MOST_IN_PART: Final = 512


class OrderedSums:
    """Amounts by keys, each of which is there once. They are in parts in the order of the keys, each with its sum, so
    that no method looks at all of them."""

    def __init__(self) -> None:
        self._parts: list[list[tuple[Key, int]]] = [[]]
        self._sums = [0]

    def add(self, key: Key, amount: int) -> None:
        """Add an amount."""
        index = self._part_of(key)
        part = self._parts[index]
        insort(part, (key, amount), key=itemgetter(0))
        self._sums[index] += amount
        if len(part) > _MOST_IN_PART:
            halves = part[: len(part) // 2], part[len(part) // 2 :]
            self._parts[index : index + 1] = halves
            self._sums[index : index + 1] = [sum(amount for _, amount in half) for half in halves]

    def remove(self, key: Key) -> None:
        """Remove the amount of a key that is there."""
        index = self._part_of(key)
        part = self._parts[index]
        place = bisect_left(part, key, key=itemgetter(0))
        found, amount = part.pop(place)
        assert found == key, "the key was added"
        self._sums[index] -= amount
        if not part and len(self._parts) > 1:
            del self._parts[index], self._sums[index]

    def before(self, key: Key) -> int:
        """Return the sum of the amounts whose keys are smaller."""
        index = self._part_of(key)
        part = self._parts[index]
        place = bisect_left(part, key, key=itemgetter(0))
        return sum(self._sums[:index]) + sum(amount for _, amount in part[:place])

    def _part_of(self, key: Key) -> int:
        """Return the last part that begins with this key or a smaller one, or the first one."""
        return bisect_right(self._parts, key, lo=1, key=lambda part: part[0][0]) - 1
