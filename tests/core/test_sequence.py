"""What a fork of a sequence starts with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from octavo.core.sequence import Sequence


@dataclass
class Tally:
    count: int

    def fork(self) -> Self:
        return type(self)(self.count)


class Other(Tally):
    """The state of another feature."""


def test_attached_state_forks_with_its_sequence() -> None:
    parent = Sequence(1, 0, [5, 6], 2)
    assert parent.attached(Tally) is None
    parent.attach(Tally(3))
    child = parent.fork(2, 1)
    child.attach(Tally(4))
    later = parent.fork(3, 2)
    assert [each.attached(Tally) for each in (parent, child, later)] == [Tally(3), Tally(4), Tally(3)]
    assert later.attached(Tally) is not parent.attached(Tally)


def test_each_feature_has_its_own_state() -> None:
    sequence = Sequence(1, 0, [5], 1)
    sequence.attach(Tally(1))
    sequence.attach(Other(2))
    assert (sequence.attached(Tally), sequence.attached(Other)) == (Tally(1), Other(2))
