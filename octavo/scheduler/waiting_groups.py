"""The groups that wait without blocks: queues of the policy, by what keeps a group's adapter from running."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from typing import Any, Final

from octavo.core.sequence import SequenceGroup
from octavo.scheduler.ordered_sums import OrderedSums
from octavo.scheduler.policy import GroupQueue, Policy


class AdapterState(enum.Enum):
    """What is known of a waiting group's adapter.

    NONE: the group uses no adapter. READY: nothing keeps the adapter from running. NO_SLOT: it lacked a slot when one
    of its groups was last looked at. UNREAD: its read could not begin then. READING: it is being read.
    """

    NONE = enum.auto()
    READY = enum.auto()
    NO_SLOT = enum.auto()
    UNREAD = enum.auto()
    READING = enum.auto()


WITH_ADAPTERS: Final = tuple(state for state in AdapterState if state is not AdapterState.NONE)


class WaitingGroups:
    """All waiting groups in the policy's order. The groups of one adapter are in the queue of its state, so that a step
    passes all queues of adapters that cannot run, and looks at none of the groups in them.

    num_adapter_changes: how often the set of the waiting groups' adapters has changed.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._queues: dict[AdapterState, GroupQueue] = {}
        self._open: list[GroupQueue] = []
        self._passed: set[AdapterState] = set()
        self._groups: dict[str, SequenceGroup] = {}
        self._by_adapter: dict[str, dict[str, SequenceGroup]] = {}
        self._states: dict[str, AdapterState] = {}
        self._preempted: dict[str, SequenceGroup] = {}
        self.num_adapter_changes = 0
        self._tokens: OrderedSums | None = None
        self._keys: dict[str, tuple[Any, ...]] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def push(self, group: SequenceGroup) -> None:
        adapter = group.request.adapter
        if adapter is not None:
            self.num_adapter_changes += adapter not in self._by_adapter
            self._by_adapter.setdefault(adapter, {})[group.request_id] = group
            if group.was_preempted:
                self._preempted[group.request_id] = group
        self._queue_in(self.state_of(adapter)).push(group)
        self._groups[group.request_id] = group
        if self._tokens is not None:
            self._count(group, self._tokens)

    def peek(self, now: float) -> SequenceGroup | None:
        """Return the next group at time `now` in the queues that are not passed over, or None."""
        return self._policy.first(self._open, now)

    def remove(self, group: SequenceGroup) -> None:
        """Remove a group from any position. Raises KeyError when it is not there."""
        adapter = group.request.adapter
        self._queues[self.state_of(adapter)].remove(group)
        del self._groups[group.request_id]
        if self._tokens is not None:
            self._tokens.remove(self._keys.pop(group.request_id))
        if adapter is not None:
            self._preempted.pop(group.request_id, None)
            of_adapter = self._by_adapter[adapter]
            del of_adapter[group.request_id]
            if not of_adapter:
                del self._by_adapter[adapter]
                self.num_adapter_changes += 1
                self._states.pop(adapter, None)

    def num_prompt_tokens_between(self, first: tuple[Any, ...], end: tuple[Any, ...]) -> int:
        """Return the prompt tokens of the groups whose keys, as they were when the groups were pushed, are at least
        `first` and smaller than `end`. They are counted from the first call on: without deadlines nothing calls this.
        """
        if self._tokens is None:
            self._tokens = OrderedSums()
            for group in self._groups.values():
                self._count(group, self._tokens)
        return max(0, self._tokens.before(end) - self._tokens.before(first))

    def _count(self, group: SequenceGroup, tokens: OrderedSums) -> None:
        key = self._keys[group.request_id] = self._policy.key(group)
        tokens.add(key, group.num_prompt_tokens)

    # ---- adapters ----

    def state_of(self, adapter: str | None) -> AdapterState:
        """Return the assumed state of the adapter."""
        return AdapterState.NONE if adapter is None else self._states.get(adapter, AdapterState.READY)

    def set_state(self, adapter: str, state: AdapterState) -> None:
        """Set the assumed state of an adapter that waiting groups have."""
        before = self.state_of(adapter)
        if before is state or adapter not in self._by_adapter:
            return
        self._states[adapter] = state
        source, target = self._queues[before], self._queue_in(state)
        for group in self._by_adapter[adapter].values():
            target.push(group)  # pushed before it is removed, so that the group is always in a queue
            source.remove(group)

    def pass_over(self, states: Iterable[AdapterState]) -> None:
        """Let `peek` return no group whose adapter is in one of these states, until `look_at_all`."""
        self._passed.update(states)
        self._select()

    def look_at_all(self) -> None:
        """End what `pass_over` began."""
        if self._passed:
            self._passed.clear()
            self._select()

    @property
    def num_adapters(self) -> int:
        """How many adapters waiting groups have."""
        return len(self._by_adapter)

    def has_adapter(self, adapter: str) -> bool:
        """Return whether a waiting group has an adapter, given by its key."""
        return adapter in self._by_adapter

    def one_of_each_adapter(self) -> Iterator[SequenceGroup]:
        """Yield one waiting group for each adapter, those first that have waited longest."""
        return (next(iter(groups.values())) for groups in self._by_adapter.values())

    @property
    def preempted_with_adapters(self) -> Iterable[SequenceGroup]:
        """The groups with adapters that have run before."""
        return self._preempted.values()

    def _queue_in(self, state: AdapterState) -> GroupQueue:
        queue = self._queues.get(state)
        if queue is None:
            queue = self._queues[state] = self._policy.make_queue()
            self._select()
        return queue

    def _select(self) -> None:
        self._open = [queue for state, queue in self._queues.items() if state not in self._passed]
