"""Longest prefix match: of the oldest waiting groups, the one that finds most of its prompt in the cache is next."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence as SequenceABC
from itertools import islice
from operator import itemgetter
from typing import Any

from octavo.core.sequence import SequenceGroup
from octavo.kv_cache.block_manager import BlockManager
from octavo.scheduler.policy import GroupQueue, Policy

WINDOW = 16
"""The oldest groups that are compared."""
MOST_PASSES = 64
"""How often a group may be passed before it is next, whatever others find: its wait is bounded to that many
admissions."""


class LongestPrefixMatch(Policy):
    """First come, first served among groups that find equally much. Preempted groups come first, then those that find
    most in the cache at this moment."""

    def __init__(self, block_manager: BlockManager) -> None:
        self._block_manager = block_manager
        self._num_passes: dict[str, int] = {}
        """How often a group was the oldest when another was admitted."""
        self._oldest: SequenceGroup | None = None
        """The oldest group of those that were compared last."""
        self._found: dict[str, int] = {}
        self._found_at = float("-inf")

    def make_queue(self) -> GroupQueue:
        return _OrderedQueue(self)

    def first(self, queues: SequenceABC[Any], now: float) -> SequenceGroup | None:
        if now != self._found_at:
            self._found_at, self._found = now, {}
        oldest = heapq.merge(*(queue.ordered[:WINDOW] for queue in queues), key=itemgetter(0))
        best: SequenceGroup | None = None
        most = -1
        group: SequenceGroup
        for place, (_, group) in enumerate(islice(oldest, WINDOW)):
            if place == 0:
                self._oldest = group
                if group.was_preempted or self._num_passes.get(group.request_id, 0) >= MOST_PASSES:
                    return group
            found = self._num_found(group)
            if found > most:
                best, most = group, found
        return best

    def _num_found(self, group: SequenceGroup) -> int:
        """Return how many tokens a group finds in the cache. It is looked up once in a step: a step publishes nothing
        before it is planned."""
        found = self._found.get(group.request_id)
        if found is None:
            first = group.live[0]
            found = self._block_manager.find_prefix(group, first, len(first.token_ids)).num_tokens
            self._found[group.request_id] = found
        return found

    def note_admitted(self, group: SequenceGroup) -> None:
        self._num_passes.pop(group.request_id, None)
        oldest, self._oldest = self._oldest, None
        if oldest is not None and oldest is not group:
            self._num_passes[oldest.request_id] = self._num_passes.get(oldest.request_id, 0) + 1

    def note_end(self, group: SequenceGroup) -> None:
        self._num_passes.pop(group.request_id, None)


class _OrderedQueue:
    """ordered: the groups with their keys, by key."""

    def __init__(self, policy: LongestPrefixMatch) -> None:
        self._policy = policy
        self.ordered: list[tuple[tuple[Any, ...], SequenceGroup]] = []
        self._keys: dict[str, tuple[Any, ...]] = {}

    def push(self, group: SequenceGroup) -> None:
        key = self._keys[group.request_id] = self._policy.key(group)
        insort(self.ordered, (key, group), key=itemgetter(0))

    def remove(self, group: SequenceGroup) -> None:
        key = self._keys.pop(group.request_id)
        del self.ordered[bisect_left(self.ordered, key, key=itemgetter(0))]
