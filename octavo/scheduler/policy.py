"""Who goes first and who gives way: the protocol of policies. One file each in `policies/`; a new one is one more."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from typing import Any, Protocol

from octavo.core.sequence import SequenceGroup


class GroupQueue(Protocol):
    """Groups that wait, in a policy's order."""

    def __len__(self) -> int: ...

    def push(self, group: SequenceGroup) -> None:
        """Take a group in that has just arrived."""
        ...

    def put_back(self, group: SequenceGroup) -> None:
        """Take a group in that has been here: it was set aside, or let in and preempted."""
        ...

    def peek(self, now: float) -> SequenceGroup | None:
        """The group that is next at time `now`, or None."""
        ...

    def pop(self, now: float) -> SequenceGroup:
        """Remove and answer it: it runs, or has ended. IndexError when there is none."""
        ...

    def set_aside(self, now: float) -> SequenceGroup:
        """Remove and answer it for the rest of this step: it comes by `put_back`. IndexError when there is none."""
        ...

    def remove(self, group: SequenceGroup) -> None:
        """Take a group out, wherever it stands. KeyError when it is not in."""
        ...


class Policy(Protocol):
    """Order of the waiting groups, and the running group that is preempted when blocks run out."""

    counts_service: bool
    """Whether `note_service` is to be called for every row."""

    may_outrank: bool
    """Whether `outranks` is ever true, or `victims_for` ever names somebody."""

    def make_queue(self) -> GroupQueue:
        """A queue for waiting groups in this policy's order. Preempted groups wait there too."""
        ...

    def key(self, group: SequenceGroup) -> tuple[Any, ...]:
        """Place of a group among those that wait, smallest first, as far as it does not depend on the time."""
        ...

    def place(self, group: SequenceGroup, now: float) -> tuple[Any, ...]:
        """Place at time `now` among those that wait or are swapped out."""
        ...

    def outranks(self, head: SequenceGroup, group: SequenceGroup, now: float) -> bool:
        """Does the prompt of `head`, a group that waits or runs, come before what is left of a running group's?"""
        ...

    def victim(self, running: SequenceABC[SequenceGroup]) -> SequenceGroup:
        """One of the running groups (there is at least one, in the order of arrival)."""
        ...

    def victims_for(self, head: SequenceGroup, running: SequenceABC[SequenceGroup]) -> SequenceABC[SequenceGroup]:
        """Running groups that may be preempted so that the first waiting one comes in, in this order."""
        ...

    def note_service(self, group: SequenceGroup, num_tokens: int, num_draws: int) -> None:
        """A step computes `num_tokens` tokens of the group and draws `num_draws` times."""
        ...

    def note_end(self, group: SequenceGroup) -> None:
        """The group has left for good: it has ended, was aborted or refused."""
        ...
