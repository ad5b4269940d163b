"""Longest prefix match: of the oldest waiting groups, the one that finds most of its prompt in the cache is next."""

from __future__ import annotations

from octavo.core.sequence import SequenceGroup
from octavo.kv_cache.block_manager import BlockManager
from octavo.scheduler.policies.first_come import FirstComeFirstServed
from octavo.scheduler.policy import GroupQueue

WINDOW = 16
"""Groups that are looked at: the oldest ones."""
MOST_PASSES = 64
"""How often a group may be passed; then it is next, whatever others find. Bounds its wait to that many admissions."""


class LongestPrefixMatch(FirstComeFirstServed):
    """First come, first served among groups that find equally much."""

    def __init__(self, block_manager: BlockManager) -> None:
        self._block_manager = block_manager

    def make_queue(self) -> GroupQueue:
        return _MatchQueue(self, self._block_manager)


class _MatchQueue:
    """Preempted groups first, then by what they find in the cache at this moment."""

    def __init__(self, policy: LongestPrefixMatch, block_manager: BlockManager) -> None:
        self._policy = policy
        self._block_manager = block_manager
        self._groups: dict[str, SequenceGroup] = {}
        self._num_passes: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def push(self, group: SequenceGroup) -> None:
        if self._groups and self._policy.key(group) < self._policy.key(next(reversed(self._groups.values()))):
            # a preempted one, or one that was set aside: back to its place
            ordered = sorted([*self._groups.values(), group], key=self._policy.key)
            self._groups = {each.request_id: each for each in ordered}
        else:
            self._groups[group.request_id] = group

    def put_back(self, group: SequenceGroup) -> None:
        self.push(group)

    def peek(self, now: float) -> SequenceGroup | None:
        best, most = None, -1
        for place, group in enumerate(self._groups.values()):
            if place == 0 and (group.was_preempted or self._num_passes.get(group.request_id, 0) >= MOST_PASSES):
                return group
            if place == WINDOW:
                break
            found = self._block_manager.find_prefix(group, group.live[0], len(group.live[0].token_ids)).num_tokens
            if found > most:
                best, most = group, found
        return best

    def pop(self, now: float) -> SequenceGroup:
        group = self.set_aside(now)
        oldest = next(iter(self._groups), None)
        if oldest is not None and self._policy.key(self._groups[oldest]) < self._policy.key(group):
            self._num_passes[oldest] = self._num_passes.get(oldest, 0) + 1
        self._num_passes.pop(group.request_id, None)
        return group

    def set_aside(self, now: float) -> SequenceGroup:
        group = self.peek(now)
        if group is None:
            raise IndexError("pop from an empty queue")
        return self._groups.pop(group.request_id)

    def remove(self, group: SequenceGroup) -> None:
        del self._groups[group.request_id]
        self._num_passes.pop(group.request_id, None)
