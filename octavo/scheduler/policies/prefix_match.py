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
    """First come, first served among groups that find equally much. It is its own queue: preempted groups come first,
    then those that find most in the cache at this moment."""

    def __init__(self, block_manager: BlockManager) -> None:
        self._block_manager = block_manager
        self._groups: dict[str, SequenceGroup] = {}
        self._num_passes: dict[str, int] = {}
        """How often a group was the oldest when another was admitted."""

    def make_queue(self) -> GroupQueue:
        return self

    def __len__(self) -> int:
        return len(self._groups)

    def push(self, group: SequenceGroup) -> None:
        if self._groups and self.key(group) < self.key(next(reversed(self._groups.values()))):
            # a group that was in the queue before: back to its place
            ordered = sorted([*self._groups.values(), group], key=self.key)
            self._groups = {each.request_id: each for each in ordered}
        else:
            self._groups[group.request_id] = group

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

    def remove(self, group: SequenceGroup) -> None:
        del self._groups[group.request_id]

    def note_admitted(self, group: SequenceGroup) -> None:
        self._num_passes.pop(group.request_id, None)
        oldest = next(iter(self._groups.values()), None)
        if oldest is not None and self.key(oldest) < self.key(group):
            self._num_passes[oldest.request_id] = self._num_passes.get(oldest.request_id, 0) + 1

    def note_end(self, group: SequenceGroup) -> None:
        self._num_passes.pop(group.request_id, None)
