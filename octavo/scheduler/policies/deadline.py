"""Earliest feasible deadline of the first token; requests that cannot meet theirs come after those that can."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceABC
from typing import Any

from octavo.core.sequence import SequenceGroup
from octavo.scheduler.policy import GroupQueue, Policy
from octavo.scheduler.rates import Rates
from octavo.scheduler.waiting_queue import WaitingQueue


class EarliestDeadline(Policy):
    """A group's place is the latest time at which its prompt can start and still make its deadline.

    `rates` say how long a prompt takes. Requests without a deadline come after those that have one and
    can make it, in order of arrival; those that cannot make it any more come last. The victim is the group with the
    latest start.
    """

    may_outrank = True

    def __init__(self, rates: Rates) -> None:
        self._rates = rates

    def make_queue(self) -> GroupQueue:
        return _DeadlineQueue(self)

    def key(self, group: SequenceGroup) -> tuple[Any, ...]:
        return (self.latest_start(group), group.virtual_start, group.arrival)

    def keys_before(self, group: SequenceGroup, now: float) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return (now,), self.key(group)  # those that are late come last

    def place(self, group: SequenceGroup, now: float) -> tuple[Any, ...]:
        latest_start = self.latest_start(group)
        is_late = latest_start < now
        return (is_late, 0.0 if is_late else latest_start, group.virtual_start, group.arrival)

    def outranks(self, head: SequenceGroup, group: SequenceGroup, now: float) -> bool:
        return now <= self.latest_start(head) < self.latest_start(group)

    def victim(self, running: SequenceABC[SequenceGroup]) -> SequenceGroup:
        return max(running, key=self.key)

    def latest_start(self, group: SequenceGroup) -> float:
        """Return seconds on the clock of `now`; infinity without a deadline, and for a group that has produced a
        token."""
        deadline = group.request.first_token_deadline
        if deadline is None or group.has_output:
            return math.inf
        return deadline - group.num_prompt_tokens / self._rates.prefill_tokens_per_s


class _DeadlineQueue:
    """The feasible groups by latest start, and behind them those that are late by arrival."""

    def __init__(self, policy: EarliestDeadline) -> None:
        self._policy = policy
        self._feasible = WaitingQueue(policy.key)
        self._late = WaitingQueue(lambda group: (group.virtual_start, group.arrival))

    def push(self, group: SequenceGroup) -> None:
        self._feasible.push(group)

    def peek(self, now: float) -> SequenceGroup | None:
        while (head := self._feasible.peek()) is not None and self._policy.latest_start(head) < now:
            self._feasible.remove(head)
            self._late.push(head)
        return self._late.peek() if head is None else head

    def place(self, now: float) -> tuple[Any, ...]:
        self.peek(now)
        is_late = not len(self._feasible)
        return (is_late, *(self._late if is_late else self._feasible).place())

    def remove(self, group: SequenceGroup) -> None:
        (self._feasible if group in self._feasible else self._late).remove(group)
