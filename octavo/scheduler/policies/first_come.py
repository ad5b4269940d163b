"""First come, first served; the youngest gives way. The base of the policies that change a part of that."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from typing import Any

from octavo.core.sequence import SequenceGroup
from octavo.scheduler.policy import GroupQueue
from octavo.scheduler.waiting_queue import WaitingQueue


class FirstComeFirstServed:
    """Preempted groups, then the others, both by arrival; the youngest running group is preempted first.

    Prompts of one API request take turns with other requests.
    """

    counts_service = False
    may_outrank = False

    def make_queue(self) -> GroupQueue:
        return WaitingQueue(self.key)

    def key(self, group: SequenceGroup) -> tuple[Any, ...]:
        return (not group.was_preempted, group.virtual_start, group.arrival)

    def place(self, group: SequenceGroup, now: float) -> tuple[Any, ...]:
        return self.key(group)

    def outranks(self, head: SequenceGroup, group: SequenceGroup, now: float) -> bool:
        return False

    def victim(self, running: SequenceABC[SequenceGroup]) -> SequenceGroup:
        return running[-1]

    def victims_for(self, head: SequenceGroup, running: SequenceABC[SequenceGroup]) -> SequenceABC[SequenceGroup]:
        return ()

    def note_service(self, group: SequenceGroup, num_tokens: int, num_draws: int) -> None:
        """Not called: who was served how much does not matter here."""

    def note_end(self, group: SequenceGroup) -> None:
        """Nothing is kept about groups."""
