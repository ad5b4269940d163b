"""Finds the token with which a sequence begins to repeat itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Self

import numpy as np

from octavo.core.repetition import RepetitionDetectionParams

_NEVER: Final = np.iinfo(np.int32).max


class Repetition:
    """What a sequence's tokens repeat, of all sizes of patterns at once.

    A token costs the same whatever the tokens are: a few microseconds for the largest pattern. Looking for each size
    anew would take milliseconds for a text of two tokens.
    """

    def __init__(self, wanted: RepetitionDetectionParams) -> None:
        most = wanted.max_pattern_size
        sizes = np.arange(1, most + 1, dtype=np.int32)
        self._needed = np.where(sizes < wanted.min_pattern_size, _NEVER, sizes * (wanted.min_count - 1))
        """For each pattern size: how many consecutive tokens must equal the token that many positions earlier."""
        self._most_tokens = most * wanted.min_count
        self._runs = np.zeros(most, np.int32)
        """For each pattern size: how many of the last consecutive tokens equal the token that many positions
        earlier.
        """
        self._room = np.full(2 * most + 1, -1, np.int64)
        """The last tokens, newest first, start at index `_first`."""
        self._first = most + 1
        self._num_read = 0

    def fork(self) -> Self:
        """Return the state of a sequence with the same tokens."""
        child = object.__new__(type(self))
        child.__dict__ = {**self.__dict__, "_runs": self._runs.copy(), "_room": self._room.copy()}
        return child

    def ends(self, token_ids: Sequence[int], num_output_tokens: int) -> bool:
        """Return whether the last num_output_tokens of token_ids end with a repetition. Tokens of the last call are not
        read again.
        """
        num_new = min(num_output_tokens - self._num_read, self._most_tokens)
        self._num_read = num_output_tokens
        for token_id in token_ids[len(token_ids) - num_new :]:
            self._read(token_id)
        return bool((self._runs >= self._needed).any())

    def _read(self, token_id: int) -> None:
        runs, room, first = self._runs, self._room, self._first
        if first == 0:
            first = len(room) - len(runs)
            room[first:] = room[: len(runs)]
        runs += 1
        runs *= room[first : first + len(runs)] == token_id
        self._first = first - 1
        room[self._first] = token_id
