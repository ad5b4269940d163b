"""Fair share per tenant by virtual token counters.

Source: Sheng et al., "Fairness in Serving Large Language Models", https://arxiv.org/abs/2401.00588.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceABC
from typing import Any

from octavo.core.sequence import SequenceGroup
from octavo.scheduler.policies.first_come import FirstComeFirstServed
from octavo.scheduler.policy import GroupQueue
from octavo.scheduler.waiting_queue import WaitingQueue

DRAW_COST = 2.0
"""A drawn token counts as this many computed ones: the weights of input and output in the paper are 1 and 2."""


class FairShare(FirstComeFirstServed):
    """The tenant that has been served least, by its weight, is next; within a tenant, first come first served.

    The difference of two backlogged tenants' counters stays within what the largest batch serves. A tenant that was
    away comes back with the smallest counter of those who wait: idleness saves nothing up. Requests without a tenant
    are one tenant together. The most served tenant's youngest group gives way.
    """

    counts_service = True

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self.counters: dict[str, float] = {}

    def make_queue(self) -> GroupQueue:
        return _TenantQueue(self.counters, self.key)

    def victim(self, running: SequenceABC[SequenceGroup]) -> SequenceGroup:
        return max(running, key=lambda group: (self.counters.get(tenant_of(group), 0.0), group.arrival))

    def note_service(self, group: SequenceGroup, num_tokens: int, num_draws: int) -> None:
        tenant = tenant_of(group)
        cost = (num_tokens + DRAW_COST * num_draws) / self._weights.get(tenant, 1.0)
        self.counters[tenant] = self.counters.get(tenant, 0.0) + cost


def tenant_of(group: SequenceGroup) -> str:
    return group.request.tenant or ""


class _TenantQueue:
    """A queue per tenant; a look at its head costs as much as there are tenants that wait."""

    def __init__(self, counters: dict[str, float], key: Callable[[SequenceGroup], tuple[Any, ...]]) -> None:
        self._counters = counters
        self._key = key
        self._queues: dict[str, WaitingQueue] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def push(self, group: SequenceGroup) -> None:
        tenant = tenant_of(group)
        if tenant not in self._queues:
            least = min((self._counters.get(other, 0.0) for other in self._queues), default=0.0)
            self._counters[tenant] = max(self._counters.get(tenant, 0.0), least)
        self.put_back(group)

    def put_back(self, group: SequenceGroup) -> None:
        tenant = tenant_of(group)
        self._counters.setdefault(tenant, 0.0)
        self._queues.setdefault(tenant, WaitingQueue(self._key)).push(group)

    def peek(self, now: float) -> SequenceGroup | None:
        queue = self._next()
        return queue.peek(now) if queue is not None else None

    def pop(self, now: float) -> SequenceGroup:
        queue = self._next()
        if queue is None:
            raise IndexError("pop from an empty queue")
        group = queue.pop(now)
        self._tidy(group)
        return group

    def remove(self, group: SequenceGroup) -> None:
        self._queues[tenant_of(group)].remove(group)
        self._tidy(group)

    def _next(self) -> WaitingQueue | None:
        if not self._queues:
            return None
        return self._queues[min(self._queues, key=lambda tenant: self._counters[tenant])]

    def _tidy(self, group: SequenceGroup) -> None:
        if not len(self._queues[tenant_of(group)]):
            del self._queues[tenant_of(group)]
