"""How groups come onto the device: blocks for a prompt, those of a cached prefix first, or a swap from the host."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC

from octavo.core.sequence import Sequence, SequenceGroup
from octavo.kv_cache.allocation import Allocation, AllocStatus, PrefixHit
from octavo.scheduler.decisions import DecisionLog
from octavo.scheduler.plan import StepPlan
from octavo.scheduler.preemption import Preemption
from octavo.scheduler.registry import Registry


class Admission:
    """Asks the block manager, and carries out its answer. Callers take groups from their queue."""

    def __init__(self, registry: Registry, preemption: Preemption, log: DecisionLog, num_lookahead_slots: int) -> None:
        self._registry = registry
        self._preemption = preemption
        self._block_manager = registry.block_manager
        self._log = log
        self._num_lookahead_slots = num_lookahead_slots

    def find_prefix(self, group: SequenceGroup) -> PrefixHit:
        """What a waiting group would find in the cache.

        When nothing runs and the pool has no room for the block to copy from beside the group's own, there is no copy:
        nobody else would ever make room.
        """
        hit = self._block_manager.find_prefix(group, group.live[0], tokens_to_allocate(group))
        if hit.partial[1] and not self._registry.running and self._ask(group, hit).status is AllocStatus.LATER:
            return hit._replace(partial=(0, 0), because="no block is left to copy the beginning of the next from")
        return hit

    def can_allocate(self, group: SequenceGroup, hit: PrefixHit) -> Allocation:
        """May a waiting group come in?"""
        allocation = self._ask(group, hit)
        is_idle = not self._registry.running
        if allocation.status is AllocStatus.LATER and is_idle and self._preemption.clear_pins(group):
            return self._ask(group, hit)
        return allocation

    def _ask(self, group: SequenceGroup, hit: PrefixHit) -> Allocation:
        return self._block_manager.can_allocate(
            group,
            hit,
            waive_watermark=not self._registry.running,
            num_lookahead=self._num_lookahead_slots,
            is_returning=group.metrics.num_preemptions > 1,
        )

    def allocate(self, group: SequenceGroup, hit: PrefixHit, plan: StepPlan, now: float) -> None:
        """Let a group in that has left the waiting queue."""
        num_tokens = tokens_to_allocate(group)
        copies = self._block_manager.allocate(group.live[0], num_tokens, hit)
        if copies:
            plan.prefix_copies[group.live[0].seq_id] = copies
        group.refork_at = num_tokens if len(group.live) > 1 else None
        self._registry.start(group)
        self._count(group, hit.because, now)
        because = f"; {hit.because}" if hit.because else ""
        cached = group.live[0].num_computed_tokens
        self._log.note("admitted", group.request, f"{cached} of {num_tokens} tokens were in the cache{because}")

    def swap_in(self, group: SequenceGroup, plan: StepPlan, now: float) -> AllocStatus:
        """Bring the head of the swapped queue back. With LATER it stays where it is; with NEVER it has ended."""
        is_idle, num_lookahead = not self._registry.running, self._num_lookahead_slots
        allocation = self._block_manager.can_swap_in(group.live, waive_watermark=is_idle, num_lookahead=num_lookahead)
        if allocation.status is AllocStatus.LATER and is_idle and self._preemption.clear_pins(group):
            allocation = self._block_manager.can_swap_in(group.live, waive_watermark=True, num_lookahead=num_lookahead)
        if allocation.status is AllocStatus.LATER:
            self._log.note("blocked", group.request, allocation.because)
            return allocation.status
        self._registry.swapped.remove(group)
        if allocation.status is AllocStatus.NEVER:
            self.refuse(group, allocation.because, now)
            return allocation.status
        moves = self._block_manager.swap_in(group.live)
        plan.swap_ins += moves
        self._registry.stats.num_swapped_in_blocks += len(moves)
        self._registry.start(group)
        group.metrics.note(now, "swapped in")
        self._log.note("swapped_in", group.request, f"{len(moves)} blocks")
        return allocation.status

    def refuse(self, group: SequenceGroup, because: str, now: float) -> None:
        """End a group that has left its queue and can never run. The door refuses such requests first."""
        self._log.note("refused", group.request, because)
        self._registry.refuse(group, because, now)

    def _count(self, group: SequenceGroup, because: str, now: float) -> None:
        cached, stats = group.live[0].num_computed_tokens, self._registry.stats
        if group.was_preempted:
            stats.num_recomputed_tokens += max(0, group.num_dropped_tokens - cached)
        else:
            stats.num_prompt_tokens += group.num_prompt_tokens
        stats.num_queried_tokens += len(group.live[0].token_ids)
        stats.num_cached_tokens += cached
        if group.metrics.first_scheduled_time is None:
            group.metrics.first_scheduled_time = now
            group.num_cached_tokens, group.cache_miss_reason = cached, because
            group.metrics.note(now, "scheduled")
        else:
            group.metrics.note(now, "scheduled again")


def tokens_to_allocate(group: SequenceGroup) -> int:
    """Tokens that the first live sequence computes for itself, or for all its siblings."""
    return common_prefix_length(group.live) if len(group.live) > 1 else len(group.live[0].token_ids)


def common_prefix_length(sequences: SequenceABC[Sequence]) -> int:
    """Leading tokens that all sequences share, without the last of the shortest: each draws after its own last."""
    shortest = min(sequences, key=lambda sequence: len(sequence.token_ids)).token_ids
    length = len(shortest) - 1
    for sequence in sequences:
        if sequence.token_ids[:length] != shortest[:length]:
            length = next(i for i in range(length) if sequence.token_ids[i] != shortest[i])
    return length
