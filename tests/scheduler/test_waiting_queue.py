"""The waiting queue keeps its order and forgets who left."""

from __future__ import annotations

import random

import pytest

from octavo.core.sequence import SequenceGroup
from octavo.scheduler.ordered_sums import OrderedSums
from octavo.scheduler.policy import Policy
from octavo.scheduler.waiting_queue import WaitingQueue
from tests.fakes.engine import make_request


def make_group(arrival: int) -> SequenceGroup:
    return SequenceGroup(make_request(f"r{arrival}", [1]), arrival, arrival)


def make_queue() -> WaitingQueue:
    return WaitingQueue(Policy().key)


def pop(queue: WaitingQueue) -> SequenceGroup | None:
    """Remove and return the first group."""
    group = queue.peek()
    if group is not None:
        queue.remove(group)
    return group


def test_groups_come_out_by_arrival() -> None:
    queue = make_queue()
    groups = [make_group(i) for i in range(4)]
    for i in (2, 0, 3, 1):
        queue.push(groups[i])
    assert queue.peek() is groups[0]
    assert [pop(queue) for _ in range(4)] == groups


def test_preempted_groups_come_before_all_others() -> None:
    queue = make_queue()
    new, preempted = make_group(0), make_group(5)
    preempted.was_preempted = True
    queue.push(new)
    queue.push(preempted)
    assert pop(queue) is preempted


def test_a_removed_group_does_not_come_out() -> None:
    queue = make_queue()
    groups = [make_group(i) for i in range(3)]
    for group in groups:
        queue.push(group)
    queue.remove(groups[0])
    assert len(queue) == 2
    assert pop(queue) is groups[1]
    with pytest.raises(KeyError):
        queue.remove(groups[0])


def test_a_group_that_comes_again_stands_where_its_key_is_then() -> None:
    queue = make_queue()
    again, other = make_group(0), make_group(1)
    again.was_preempted = other.was_preempted = True
    queue.push(again)
    queue.push(other)
    queue.remove(again)
    again.was_preempted = False
    queue.push(again)
    assert [pop(queue), pop(queue)] == [other, again]
    assert queue.peek() is None


def test_the_order_outlives_many_removals() -> None:
    queue = make_queue()
    groups = [make_group(i) for i in range(100)]
    for group in reversed(groups):
        queue.push(group)
    for group in groups[5:95]:
        queue.remove(group)
    assert [pop(queue) for _ in range(len(queue))] == groups[:5] + groups[95:]


def test_many_removed_groups_take_no_room() -> None:
    queue = make_queue()
    groups = [make_group(i) for i in range(100)]
    for group in groups:
        queue.push(group)
    for group in groups[1:]:
        queue.remove(group)
    assert len(queue._heap) < 20
    assert pop(queue) is groups[0]
    assert queue.peek() is None


def test_sums_before_a_key_are_those_of_all_smaller_ones() -> None:
    draw, sums = random.Random(4), OrderedSums()
    amounts: dict[tuple[int, int], int] = {}
    for number in range(6000):
        if amounts and draw.random() < 0.3:
            removed = draw.choice(list(amounts))
            sums.remove(removed)
            del amounts[removed]
        else:
            key = draw.randrange(1000), number
            amounts[key] = draw.randrange(100)
            sums.add(key, amounts[key])
        if number % 20 == 0:
            bound = (draw.randrange(1010),)
            assert sums.before(bound) == sum(amount for key, amount in amounts.items() if key < bound)
    assert len(sums._parts) > 2
    for key in list(amounts):
        sums.remove(key)
    assert sums.before((2000,)) == 0
