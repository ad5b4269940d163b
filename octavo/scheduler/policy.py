"""Who goes first and who gives way. A policy is one small class."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from typing import Any, Protocol

from octavo.core.sequence import SequenceGroup


class Policy(Protocol):
    """Order of the waiting groups, and the running group that is preempted when blocks run out."""

    def key(self, group: SequenceGroup) -> tuple[Any, ...]:
        """Place among the waiting, smallest first."""
        ...

    def victim(self, running: SequenceABC[SequenceGroup]) -> SequenceGroup:
        """One of the running groups (there is at least one, in the order of arrival)."""
        ...


class FirstComeFirstServed:
    """Preempted groups by arrival, then the others by arrival; the youngest running group gives way."""

    def key(self, group: SequenceGroup) -> tuple[Any, ...]:
        return (not group.was_preempted, group.arrival)

    def victim(self, running: SequenceABC[SequenceGroup]) -> SequenceGroup:
        return running[-1]


POLICIES: dict[str, type[Policy]] = {"fcfs": FirstComeFirstServed}
