"""Finds what came after the last tokens of a text when they stood somewhere before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Match(NamedTuple):
    """The latest of the longest occurrences: `length` tokens that end before token number `end`."""

    end: int
    length: int


class History:
    """Tokens that are searched. A search reads each of them once."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._tokens = array("i", tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def copy(self) -> History:
        """Return the same tokens in memory of their own."""
        return History(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        self._tokens.extend(tokens)

    def drop_first(self, count: int) -> None:
        """Forget the oldest `count` tokens."""
        del self._tokens[:count]

    def last(self, count: int) -> Sequence[int]:
        """Return the last `count` tokens, or all if there are fewer."""
        return self._tokens[-count:]

    def find(self, tail: Sequence[int], shortest: int, *, is_own: bool = False) -> Match | None:
        """Return where the longest end of `tail`, of at least `shortest` tokens, stands. is_own: `tail` is the end of
        these tokens, which is not meant."""
        past: NDArray[np.int32] = np.frombuffer(self._tokens, dtype=np.int32)
        if is_own:
            past = past[:-1]
        if len(tail) < shortest:
            return None
        ends = np.flatnonzero(past == tail[-1]) + 1
        found: Match | None = None
        for length in range(1, len(tail) + 1):
            if length > 1:
                ends = ends[ends >= length]
                ends = ends[past[ends - length] == tail[-length]]
            if not len(ends):
                break
            if length >= shortest:
                found = Match(int(ends[-1]), length)
        return found

    def after(self, end: int, count: int) -> list[int]:
        """Return `count` tokens from number `end` on. Behind the last one the text goes on as it did from there: what
        repeats itself is guessed to go on repeating itself."""
        found = self._tokens[end : end + count].tolist()
        period = len(found)
        while found and len(found) < count:
            found += found[-period:][: count - len(found)]
        return found
