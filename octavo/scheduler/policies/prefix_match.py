"""Longest prefix match: of the oldest waiting groups, the one that finds most of its prompt in the cache is next."""

from __future__ import annotations

from octavo.core.sequence import SequenceGroup
from octavo.kv_cache.block_manager import BlockManager
from octavo.scheduler.policy import GroupQueue, Policy

WINDOW = 16
"""The oldest groups that are compared."""
MOST_PASSES = 64
"""How often a group may be passed before it is next, whatever others find: its wait is bounded to that many
admissions."""


class LongestPrefixMatch(Policy):
    """First come, first served among groups that find equally much."""

    def __init__(self, block_manager: BlockManager) -> None:
        self._queue = _MatchQueue(self, block_manager)

    def make_queue(self) -> GroupQueue:
        return self._queue

    def note_admitted(self, group: SequenceGroup) -> None:
        self._queue.note_admitted(group)

    def note_end(self, group: SequenceGroup) -> None:
        self._queue.num_passes.pop(group.request_id, None)


class _MatchQueue:
    """Preempted groups first, then by what they find in the cache at this moment.

    num_passes: how often a group was the oldest when another was admitted.
    """

    def __init__(self, policy: Policy, block_manager: BlockManager) -> None:
        self._policy = policy
        self._block_manager = block_manager
        self._groups: dict[str, SequenceGroup] = {}
        self.num_passes: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def push(self, group: SequenceGroup) -> None:
        if self._groups and self._policy.key(group) < self._policy.key(next(reversed(self._groups.values()))):
            # a group that was in the queue before: back to its place
            ordered = sorted([*self._groups.values(), group], key=self._policy.key)
            self._groups = {each.request_id: each for each in ordered}
        else:
            self._groups[group.request_id] = group

    def peek(self, now: float) -> SequenceGroup | None:
        best, most = None, -1
        for place, group in enumerate(self._groups.values()):
            if place == 0 and (group.was_preempted or self.num_passes.get(group.request_id, 0) >= MOST_PASSES):
                return group
            if place == WINDOW:
                break
            found = self._block_manager.find_prefix(group, group.live[0], len(group.live[0].token_ids)).num_tokens
            if found > most:
                best, most = group, found
        return best

    def remove(self, group: SequenceGroup) -> None:
        del self._groups[group.request_id]

    def note_admitted(self, group: SequenceGroup) -> None:
        self.num_passes.pop(group.request_id, None)
        oldest = next(iter(self._groups.values()), None)
        if oldest is not None and self._policy.key(oldest) < self._policy.key(group):
            self.num_passes[oldest.request_id] = self.num_passes.get(oldest.request_id, 0) + 1
