"""Priorities with ageing: smaller numbers first; who waits long catches up; running requests give way to better."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from typing import Any

from octavo.core.sequence import SequenceGroup
from octavo.scheduler.policies.first_come import FirstComeFirstServed


class Priority(FirstComeFirstServed):
    """`ageing_s` seconds of waiting count as one priority; 0 switches ageing off.

    All groups age alike, so their order never changes while they wait: it is that of `priority + arrival / ageing_s`.
    Only a request with a strictly smaller number preempts a running one, so ageing decides who is next, and nobody is
    preempted by a request of its own class.
    """

    def __init__(self, ageing_s: float = 0.0) -> None:
        self._per_second = 1 / ageing_s if ageing_s else 0.0

    def key(self, group: SequenceGroup) -> tuple[Any, ...]:
        return (group.request.priority + group.request.arrival_time * self._per_second, group.arrival)

    def victim(self, running: SequenceABC[SequenceGroup]) -> SequenceGroup:
        return max(running, key=_rank)

    def gives_way_to(self, head: SequenceGroup, running: SequenceABC[SequenceGroup]) -> SequenceGroup | None:
        worst = max(running, key=_rank, default=None)
        return worst if worst is not None and worst.request.priority > head.request.priority else None


def _rank(group: SequenceGroup) -> tuple[int, int]:
    return group.request.priority, group.arrival
