"""Whom the first waiting group pushes off the device: as few running groups as make room for it, or nobody."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from octavo.core.sequence import SequenceGroup
from octavo.kv_cache.allocation import Allocation
from octavo.scheduler.budget import AdapterBudget, PartialBudget, WholeBudget
from octavo.scheduler.plan import StepPlan
from octavo.scheduler.policy import Policy
from octavo.scheduler.preemption import Preemption
from octavo.scheduler.registry import Registry


class Shortage(NamedTuple):
    """What a waiting group lacks to come in: KV blocks, sequences, slots for its adapter."""

    num_blocks: int
    num_sequences: int
    num_slots: int


class Displacement:
    """Asks the policy who gives way, and preempts no more than it takes."""

    def __init__(self, registry: Registry, preemption: Preemption, policy: Policy) -> None:
        self._registry = registry
        self._preemption = preemption
        self._policy = policy
        self._in_vain: dict[str, Shortage] = {}
        self._in_vain_since = 0

    def make_way(
        self,
        head: SequenceGroup,
        allocation: Allocation,
        sequences: WholeBudget,
        adapters: AdapterBudget,
        plan: StepPlan,
        tokens: PartialBudget,
    ) -> bool:
        """Preempt running groups that give way to the first waiting one, and give back what they had of the budgets.
        Nobody is preempted, and the answer is False, when all of them together would not make up for what it lacks."""
        num_sequences = sequences.num_missing(head.max_running_sequences)
        shortage = Shortage(allocation.num_missing, num_sequences, bool(adapters.refusal(head.request.adapter)))
        victims = self._victims(head, shortage)
        for group in victims:
            self._preemption.preempt(group, plan, tokens, because=f"{head.request_id} comes before it")
            sequences.refund(group.max_running_sequences)
        adapters.count(group.request.adapter for group in self._registry.running)
        return bool(victims)

    def _victims(self, head: SequenceGroup, shortage: Shortage) -> list[SequenceGroup]:
        """As few as suffice; none when all do not."""
        if self._is_known_to_be_in_vain(head, shortage):
            return []
        candidates = self._policy.gives_way_to(head, self._registry.running)
        if not candidates:
            return []
        room = _Room(self._registry)
        victims: list[SequenceGroup] = []
        for group in candidates:
            victims.append(group)
            room.add(group)
            if room.covers(shortage):
                break
        else:
            self._in_vain[head.request_id] = shortage
            return []
        for group in victims[:-1]:
            room.remove(group)
            if room.covers(shortage):
                victims.remove(group)  # those behind it do without
            else:
                room.add(group)
        return victims

    def _is_known_to_be_in_vain(self, head: SequenceGroup, shortage: Shortage) -> bool:
        """Whoever is let in takes what it would give back, so only when somebody leaves there is more to be had."""
        if self._in_vain_since != self._registry.num_departures:
            self._in_vain_since = self._registry.num_departures
            self._in_vain.clear()
        known = self._in_vain.get(head.request_id)
        return known is not None and all(now >= then for now, then in zip(shortage, known, strict=True))


class _Room:
    """What would be free without some of the running groups."""

    def __init__(self, registry: Registry) -> None:
        self._manager = registry.block_manager
        self._num_users: Counter[int] = Counter()
        self._num_groups = Counter(group.request.adapter for group in registry.running)
        self._num_blocks = self._num_sequences = self._num_slots = 0

    def covers(self, shortage: Shortage) -> bool:
        return (
            self._num_blocks >= shortage.num_blocks
            and self._num_sequences >= shortage.num_sequences
            and self._num_slots >= shortage.num_slots
        )

    def add(self, group: SequenceGroup) -> None:
        """Without this one too."""
        for block in self._manager.blocks_of(group.live):
            self._num_users[block] += 1
            self._num_blocks += self._num_users[block] == self._manager.pool.num_users(block)
        self._num_sequences += group.max_running_sequences
        adapter = group.request.adapter
        self._num_groups[adapter] -= 1
        self._num_slots += adapter is not None and self._num_groups[adapter] == 0

    def remove(self, group: SequenceGroup) -> None:
        """It stays after all."""
        for block in self._manager.blocks_of(group.live):
            self._num_blocks -= self._num_users[block] == self._manager.pool.num_users(block)
            self._num_users[block] -= 1
        self._num_sequences -= group.max_running_sequences
        adapter = group.request.adapter
        self._num_slots -= adapter is not None and self._num_groups[adapter] == 0
        self._num_groups[adapter] += 1
