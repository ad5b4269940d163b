"""Finds what came after the last tokens of a text when they stood somewhere before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Match(NamedTuple):
    """The latest of the longest occurrences: `length` tokens that end before token number `end`."""

    end: int
    length: int


_FLAGS_PER_TOKEN: Final = 4
"""Flags for pairs of tokens per token of a history: so many that most pairs that do not occur have none set."""
_FEWEST_FLAGS: Final = 1 << 10
_MOST_IN_A_LOOP: Final = 32
_FACTORS: Final = 0x9E3779B1, 0x85EBCA77


class History:
    """Tokens that are searched, as the `Attachment` of a sequence or for many. A search reads each of them once, unless
    its last two never stood side by side."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._tokens = array("i", tokens)
        self._flags = bytearray()
        """By the hash of two tokens: whether a pair with it occurs. Their number is a power of two."""
        self._num_flagged = 0
        """Tokens whose pair with the one before has its flag."""

    def __len__(self) -> int:
        return len(self._tokens)

    def fork(self) -> History:
        """Return the same tokens in memory of their own."""
        return History(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        self._tokens.extend(tokens)

    def drop_first(self, count: int) -> None:
        """Forget the oldest `count` tokens."""
        del self._tokens[:count]
        if count:
            self._flags, self._num_flagged = bytearray(), 0

    def last(self, count: int) -> Sequence[int]:
        """Return the last `count` tokens, or all if there are fewer."""
        return self._tokens[-count:]

    def find(self, tail: Sequence[int], shortest: int, *, is_own: bool = False) -> Match | None:
        """Return where the longest end of `tail`, of at least `shortest` tokens, stands. is_own: `tail` is the end of
        these tokens, which is not meant."""
        if len(tail) < shortest or (shortest > 1 and not self._may_have(tail, len(self._tokens) - is_own)):
            return None
        past: NDArray[np.int32] = np.frombuffer(self._tokens, dtype=np.int32)
        if is_own:
            past = past[:-1]
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

    def _may_have(self, tail: Sequence[int], end: int) -> bool:
        """Return False where the last two tokens of `tail` never follow each other in the first `end` ones."""
        if end < 2:
            return False
        if _FLAGS_PER_TOKEN * end > 2 * len(self._flags):
            self._flags = bytearray(max(_FEWEST_FLAGS, 1 << (_FLAGS_PER_TOKEN * end - 1).bit_length()))
            self._num_flagged = 0
        flags, mask, (one, other) = self._flags, len(self._flags) - 1, _FACTORS
        if end - self._num_flagged > _MOST_IN_A_LOOP:
            tokens = np.array(self._tokens[max(0, self._num_flagged - 1) : end], dtype=np.int64)
            np.frombuffer(flags, dtype=np.uint8)[(tokens[:-1] * one + tokens[1:] * other) & mask] = 1
        else:
            for place in range(max(1, self._num_flagged), end):
                flags[(self._tokens[place - 1] * one + self._tokens[place] * other) & mask] = 1
        self._num_flagged = max(self._num_flagged, end)
        return bool(flags[(tail[-2] * one + tail[-1] * other) & mask])

    def after(self, end: int, count: int) -> list[int]:
        """Return `count` tokens from number `end` on. Behind the last one the text goes on as it did from there: what
        repeats itself is guessed to go on repeating itself."""
        found = self._tokens[end : end + count].tolist()
        period = len(found)
        while found and len(found) < count:
            found += found[-period:][: count - len(found)]
        return found
