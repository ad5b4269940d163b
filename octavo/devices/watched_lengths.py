"""Finds what reads the lengths of sequences on the host, where a step is to be repeated without Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any


class WatchedLengths(Sequence[int]):
    """Lengths that call `meet` with the reason when one is read: in the next step they are others."""

    def __init__(self, lengths: Sequence[int], meet: Callable[[str], None]) -> None:
        self._lengths = lengths
        self._meet = meet

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: Any) -> Any:
        self._note()
        return self._lengths[index]

    def __iter__(self) -> Iterator[int]:
        self._note()
        return iter(self._lengths)

    def _note(self) -> None:
        self._meet("what reads the lengths of sequences on the host")
