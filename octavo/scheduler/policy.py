"""In which order groups run, and which running group is preempted. One file each in `policies/`."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from typing import Any, Protocol

from octavo.core.sequence import SequenceGroup
from octavo.scheduler.waiting_queue import WaitingQueue


class GroupQueue(Protocol):
    """Groups that wait. The policy that made the queue knows their order (`Policy.first`)."""

    def push(self, group: SequenceGroup) -> None:
        """Add a group: a new one, a preempted one, or one that was removed for the rest of a step."""

    def remove(self, group: SequenceGroup) -> None:
        """Remove a group from any position. Raises KeyError when it is not in the queue."""


class Policy:
    """First come, first served: preempted groups, then the others, both by arrival; the youngest running group is
    preempted first. Prompts of one API request take turns with other requests.

    Other policies override what they do differently. A policy changes no group.
    """

    counts_service = False
    """Whether `note_service` is to be called for every row."""

    may_outrank = False
    """Whether `outranks` is ever true, or `victims_for` ever returns a group."""

    def make_queue(self) -> GroupQueue:
        """Return an empty queue for waiting groups, new and preempted ones, in this policy's order. Each waiting group
        is in one of the queues."""
        return WaitingQueue(self.key)

    def first(self, queues: SequenceABC[Any], now: float) -> SequenceGroup | None:
        """Return the next group at time `now` in some of the queues that `make_queue` made, or None. Their `peek`
        returns a queue's next group, and their `place` the place of that group.
        """
        heads: list[tuple[Any, SequenceGroup]] = []
        for queue in queues:
            if (head := queue.peek(now)) is not None:
                heads.append((queue, head))
        if len(heads) <= 1:
            return heads[0][1] if heads else None
        return min(heads, key=lambda each: each[0].place(now))[1]

    def key(self, group: SequenceGroup) -> tuple[Any, ...]:
        """Return the place of a group among those that wait, smallest first, as far as it does not depend on the
        time."""
        return (not group.was_preempted, group.virtual_start, group.arrival)

    def keys_before(self, group: SequenceGroup, now: float) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the smallest key of waiting groups, and the key behind the largest, that come before a new group at
        time `now`."""
        return (), self.key(group)

    def place(self, group: SequenceGroup, now: float) -> tuple[Any, ...]:
        """Return the place at time `now` among those that wait or are swapped out."""
        return self.key(group)

    def outranks(self, head: SequenceGroup, group: SequenceGroup, now: float) -> bool:
        """Return whether the prompt of `head`, a group that waits or runs, is computed before what is left of a running
        group's prompt."""
        return False

    def victim(self, running: SequenceABC[SequenceGroup]) -> SequenceGroup:
        """Return the running group that is preempted when no block is free. There is at least one; they are in the
        order of arrival."""
        return running[-1]

    def victims_for(self, head: SequenceGroup, running: SequenceABC[SequenceGroup]) -> SequenceABC[SequenceGroup]:
        """Return the running groups that may be preempted, in this order, to admit the first waiting group."""
        return ()

    def note_arrival(self, group: SequenceGroup) -> None:
        """Note that a new group is about to be pushed to the queue."""

    def note_admitted(self, group: SequenceGroup) -> None:
        """Note that a group has been removed from the queue and runs."""

    def note_service(self, group: SequenceGroup, num_tokens: int, num_draws: int) -> None:
        """Note that a step computes `num_tokens` tokens of the group and draws `num_draws` times."""

    def note_end(self, group: SequenceGroup) -> None:
        """Note that the group has finished, failed, or was aborted or refused."""
