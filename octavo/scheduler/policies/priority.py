"""Priorities with ageing: smaller numbers first; waiting raises a request's rank; running requests are preempted."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from typing import Any

from octavo.core.sequence import SequenceGroup
from octavo.scheduler.policy import Policy


class Priority(Policy):
    """`ageing_s` seconds of waiting count as one priority; 0 switches ageing off.

    All groups age alike, so their order never changes while they wait: it is that of `priority + arrival / ageing_s`.
    A running group is preempted for a waiting one that comes before it in that order and has a strictly smaller number,
    so never for a request of its own class. For the same ones the rest of its prompt is computed later.
    """

    may_outrank = True

    def __init__(self, ageing_s: float = 0.0) -> None:
        self._per_second = 1 / ageing_s if ageing_s else 0.0

    def key(self, group: SequenceGroup) -> tuple[Any, ...]:
        age = group.request.arrival_time * self._per_second
        return (group.request.priority + age, group.virtual_start, group.arrival)

    def outranks(self, head: SequenceGroup, group: SequenceGroup, now: float) -> bool:
        return self._comes_before(head, group)

    def victim(self, running: SequenceABC[SequenceGroup]) -> SequenceGroup:
        return max(running, key=self.key)

    def victims_for(self, head: SequenceGroup, running: SequenceABC[SequenceGroup]) -> SequenceABC[SequenceGroup]:
        worse = (group for group in running if self._comes_before(head, group))
        return sorted(worse, key=self.key, reverse=True)

    def _comes_before(self, head: SequenceGroup, group: SequenceGroup) -> bool:
        return head.request.priority < group.request.priority and self.key(head) < self.key(group)
