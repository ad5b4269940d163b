"""Streams without a GPU, in the orders that a GPU might choose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class HostStream:
    """What computes: its work is done at once."""

    def run(self, work: Callable[[], object]) -> None:
        work()

    def wait_for(self, other: Any) -> None:
        other.flush()

    def finish(self) -> None:
        """Do nothing: its work is done."""


class LateStream:
    """Its work is done as late as it may be: when another stream waits for it."""

    def __init__(self) -> None:
        self._works: list[Callable[[], object]] = []

    def run(self, work: Callable[[], object]) -> None:
        self._works.append(work)

    def wait_for(self, other: HostStream) -> None:
        """Do nothing: the host's work is done."""

    def finish(self) -> None:
        self.flush()

    def flush(self) -> None:
        for work in self._works:
            work()
        self._works = []


class KeptStream:
    """Keeps its work until `finish`."""

    def __init__(self) -> None:
        self.works: list[Callable[[], object]] = []
        self.waits: dict[int, list[tuple[KeptStream, int]]] = {}
        """By place in `works`: how many works of other streams have to be done before."""
        self.num_done = 0

    def run(self, work: Callable[[], object]) -> None:
        self.works.append(work)

    def wait_for(self, other: KeptStream) -> None:
        self.waits.setdefault(len(self.works), []).append((other, len(other.works)))

    def finish(self) -> None:
        raise AssertionError("the host waits for swaps")

    @property
    def is_ready(self) -> bool:
        """Whether its next work may be done."""
        before = [wait for place, waits in self.waits.items() if place <= self.num_done for wait in waits]
        return self.num_done < len(self.works) and all(other.num_done >= count for other, count in before)


def finish(streams: Sequence[KeptStream]) -> None:
    """Do all work, that of the first streams as early as it may be done."""
    while ready := [each for each in streams if each.is_ready]:
        ready[0].works[ready[0].num_done]()
        ready[0].num_done += 1
    assert all(each.num_done == len(each.works) for each in streams), "streams wait for each other"
