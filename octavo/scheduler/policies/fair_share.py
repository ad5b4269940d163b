"""Fair share per tenant by virtual token counters.

Source: Sheng et al., "Fairness in Serving Large Language Models", https://arxiv.org/abs/2401.00588.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC
from typing import Any

from octavo.core.sequence import SequenceGroup
from octavo.scheduler.policy import GroupQueue, Policy
from octavo.scheduler.waiting_queue import WaitingQueue

DRAW_COST = 2.0
"""A drawn token counts as this many computed ones: the weights of input and output in the paper are 1 and 2."""


class FairShare(Policy):
    """The tenant that was served least, by its weight, is next; within a tenant, first come, first served.

    The difference of two backlogged tenants' counters stays within what the largest batch serves. A tenant that had no
    waiting group returns with the smallest counter of those that wait, or, when none waits, with that of the last one
    that did: idle time gives no credit. Requests without a tenant are one tenant together. The victim is the youngest
    group of the most served tenant.

    A tenant without requests whose counter is not above the one with which it would return is forgotten: it returns
    with the same. That is checked when `max_idle` more counters are kept than after the last check.
    """

    counts_service = True

    def __init__(self, weights: Mapping[str, float] | None = None, max_idle: int = 256) -> None:
        self._weights = dict(weights or {})
        self._max_idle = max_idle
        self._num_kept = 0
        self.counters: dict[str, float] = {}
        self._queues: list[_TenantQueues] = []
        self._num_waiting: dict[str, int] = {}
        """Waiting groups of each tenant that has any, in all queues."""
        self.came: dict[str, int] = {}
        """By tenant that waits: a number by which it came."""
        self._num_came = 0
        self._num_open: dict[str, int] = {}
        self._last: str | None = None
        self._floor = 0.0

    def make_queue(self) -> GroupQueue:
        queue = _TenantQueues(self)
        self._queues.append(queue)
        return queue

    def note_pushed(self, tenant: str) -> None:
        """A group of the tenant is about to be pushed to one of the queues."""
        self.counters.setdefault(tenant, 0.0)
        if tenant not in self._num_waiting:
            self.came[tenant] = self._num_came = self._num_came + 1
        self._num_waiting[tenant] = self._num_waiting.get(tenant, 0) + 1

    def note_removed(self, tenant: str) -> None:
        """A group of the tenant has been removed from one of the queues."""
        self._num_waiting[tenant] -= 1
        if not self._num_waiting[tenant]:
            del self._num_waiting[tenant], self.came[tenant]
            self._last = tenant

    def victim(self, running: SequenceABC[SequenceGroup]) -> SequenceGroup:
        return max(running, key=lambda group: (self.counters.get(_tenant_of(group), 0.0), group.arrival))

    def note_arrival(self, group: SequenceGroup) -> None:
        tenant = _tenant_of(group)
        self._num_open[tenant] = self._num_open.get(tenant, 0) + 1
        if tenant not in self._num_waiting:
            self.counters[tenant] = max(self.counters.get(tenant, 0.0), self._raise_floor())

    def note_service(self, group: SequenceGroup, num_tokens: int, num_draws: int) -> None:
        tenant = _tenant_of(group)
        cost = (num_tokens + DRAW_COST * num_draws) / self._weights.get(tenant, 1.0)
        self.counters[tenant] = self.counters.get(tenant, 0.0) + cost

    def note_end(self, group: SequenceGroup) -> None:
        tenant = _tenant_of(group)
        self._num_open[tenant] -= 1
        if self._num_open[tenant] == 0:
            del self._num_open[tenant]
        if len(self.counters) > 2 * self._num_kept + self._max_idle:
            self._forget_idle()

    def _forget_idle(self) -> None:
        """Drop the counters of tenants without groups that would return with the same."""
        floor = self._raise_floor()
        for tenant in [name for name, counter in self.counters.items() if counter <= floor]:
            if tenant not in self._num_open:
                del self.counters[tenant]
        self._num_kept = len(self.counters)

    def _raise_floor(self) -> float:
        """Return the smallest counter with which a tenant returns now. It never falls: no tenant that waits is below
        it."""
        waiting = [served for queue in self._queues if (served := queue.least_served()) is not None]
        tenant = min(waiting)[2] if waiting else self._last
        least = 0.0 if tenant is None else self.counters.get(tenant, 0.0)
        self._floor = max(self._floor, least)
        return self._floor


class _TenantQueues:
    """A queue for each tenant.

    The tenants are in a heap by counter: an entry of one that was served since is put in its place when it reaches the
    top, one that does not wait here any more is dropped.
    """

    def __init__(self, policy: FairShare) -> None:
        self._policy = policy
        self._queues: dict[str, WaitingQueue] = {}
        self._heap: list[tuple[float, int, str]] = []
        """Counters of tenants that wait, the numbers by which they came, and their names."""

    def push(self, group: SequenceGroup) -> None:
        tenant = _tenant_of(group)
        self._policy.note_pushed(tenant)
        if tenant not in self._queues:
            self._queues[tenant] = WaitingQueue(self._policy.key)
            heapq.heappush(self._heap, self._entry(tenant))
        self._queues[tenant].push(group)

    def peek(self, now: float) -> SequenceGroup | None:
        least = self.least_served()
        return None if least is None else self._queues[least[2]].peek()

    def place(self, now: float) -> tuple[Any, ...]:
        least = self.least_served()
        assert least is not None, "an empty queue has no first group"
        return (*least[:2], *self._queues[least[2]].place())

    def remove(self, group: SequenceGroup) -> None:
        tenant = _tenant_of(group)
        self._queues[tenant].remove(group)
        if not len(self._queues[tenant]):
            del self._queues[tenant]
            if len(self._heap) > 2 * len(self._queues) + 8:
                self._heap = [self._entry(each) for each in self._queues]
                heapq.heapify(self._heap)
        self._policy.note_removed(tenant)

    def least_served(self) -> tuple[float, int, str] | None:
        """Return the entry of the tenant with the smallest counter of those that wait, of several the one that came
        first."""
        while self._heap:
            top = self._heap[0]
            if top[2] not in self._queues:
                heapq.heappop(self._heap)
            elif top != (entry := self._entry(top[2])):  # it was served: counters of tenants that wait never fall
                heapq.heapreplace(self._heap, entry)
            else:
                return top
        return None

    def _entry(self, tenant: str) -> tuple[float, int, str]:
        return self._policy.counters[tenant], self._policy.came[tenant], tenant


def _tenant_of(group: SequenceGroup) -> str:
    return group.request.tenant or ""
