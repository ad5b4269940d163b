"""Preemption: blocks of running groups are freed and computed again later, or moved to the host and back.

The modes are those of vLLM's first engine and one more: `recompute` and `swap` always do that (swap as long as the
host has room), `classic` swaps groups with several live sequences and recomputes the others, `auto` takes what is
estimated to cost less time.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from octavo.config.schema import PreemptionMode
from octavo.core.sequence import SequenceGroup, SequenceStatus
from octavo.core.step import BlockCopy
from octavo.kv_cache.block_manager import BlockManager
from octavo.scheduler.plan import StepPlan
from octavo.scheduler.rates import Rates
from octavo.scheduler.registry import Registry

Missing = tuple[int, ...]
"""How many KV blocks of each cache group, and how much of each budget, a waiting group lacks to be admitted."""


class SwapChoice(NamedTuple):
    """Swap or recompute, and the reason in words."""

    swap: bool
    because: str


class _Dropped(NamedTuple):
    """What a preempted group had in the step: computed tokens by sequence id without those that the step would have
    computed, and by cache group and block the block that it would have been copied from."""

    num_computed: dict[int, int]
    copied_from: dict[tuple[int, int], int]


class Preemption:
    """Preempts running groups: for a block, or for a waiting group that the policy places before them."""

    def __init__(self, registry: Registry, mode: PreemptionMode, rates: Rates) -> None:
        self._registry = registry
        self._block_manager = registry.block_manager
        self._mode = mode
        self._rates = rates
        self._futile: dict[str, Missing] = {}
        self._futile_since = 0

    def preempt(self, group: SequenceGroup, plan: StepPlan | None = None, because: str = "") -> None:
        """Take a running group's blocks, and its rows and budgets in `plan`. Known tokens stay known."""
        dropped = self._drop_rows(group, plan)
        choice = self._choose(group, plan, dropped)
        status = SequenceStatus.SWAPPED if choice.swap else SequenceStatus.WAITING
        self._registry.suspend(group, status, self._registry.log.now)
        if choice.swap:
            assert plan is not None
            self._swap_out(group, plan, dropped)
        else:
            self._release(group, dropped.num_computed)
        if plan is not None:
            plan.has_preempted = True
            plan.release(group)
        how = "swapped out" if choice.swap else "to be recomputed"
        self._registry.log.note("preempted", group.request, f"{because}; {how}: {choice.because}")

    def drop_swapped(self, group: SequenceGroup, because: str) -> None:
        """Take a swapped group's blocks on the host: it is recomputed."""
        self._registry.unswap(group)
        self._release(group, {sequence.seq_id: sequence.num_computed_tokens for sequence in group.live})
        self._registry.log.note("preempted", group.request, f"{because}; to be recomputed: it was swapped out")

    def _release(self, group: SequenceGroup, num_computed: dict[int, int]) -> None:
        group.num_dropped_tokens = _num_computed_tokens(group, num_computed)
        for sequence in group.live:
            self._block_manager.release(sequence)
            sequence.restart()

    def _drop_rows(self, group: SequenceGroup, plan: StepPlan | None) -> _Dropped:
        """Take the group's rows out of the step."""
        dropped = _Dropped({}, {})
        for sequence in group.live:
            dropped.num_computed[sequence.seq_id] = sequence.num_computed_tokens
            if plan is not None:
                copies = plan.prefix_copies.pop(sequence.seq_id, [])
                if (planned := plan.drop(group, sequence)) is not None:
                    dropped.num_computed[sequence.seq_id] = planned.row.start
                    copies = copies + planned.copies
                    if planned.message is not None:
                        sequence.is_resident = False  # the worker does not have it yet
                dropped.copied_from.update(((copy.group, copy.target), copy.source) for copy in copies)
        return dropped

    def _swap_out(self, group: SequenceGroup, plan: StepPlan, dropped: _Dropped) -> None:
        for sequence in group.live:
            keeps_pending = self._block_manager.keeps_states
            sequence.pause(dropped.num_computed[sequence.seq_id], keeps_pending=keeps_pending)
        moves = self._block_manager.swap_out(group.live)
        # a copy that this step would have made is not made: what it would have copied is still at its source
        plan.swap_outs += [
            BlockCopy(_origin(move.group, move.source, dropped.copied_from), move.target, move.group) for move in moves
        ]

    # ---- for a waiting group that comes before running ones ----

    def preempt_for(self, head: SequenceGroup, missing_blocks: Missing, plan: StepPlan) -> bool:
        """Preempt as few running groups, of those that the policy names, as it takes to admit the first waiting group.
        Returns False, with none preempted, when all of them would not suffice."""
        victims = self._victims_for(head, missing_blocks, plan)
        for group in victims:
            self.preempt(group, plan, because=f"{head.request_id} comes before it")
        return bool(victims)

    def _victims_for(self, head: SequenceGroup, missing_blocks: Missing, plan: StepPlan) -> list[SequenceGroup]:
        missing_blocks = missing_blocks or (0,) * len(self._block_manager.groups)
        missing = (*missing_blocks, *plan.num_missing(head))
        if self._is_known_to_be_futile(head, missing):
            return []
        candidates = self._registry.policy.victims_for(head, self._registry.running)
        if not candidates:
            return []
        freed = _FreedBlocks(self._block_manager)

        def suffices() -> bool:
            return freed.covers(missing_blocks) and plan.lacking(head) is None

        victims: list[SequenceGroup] = []
        for group in candidates:
            victims.append(group)
            freed.add(group)
            plan.release(group)
            if suffices():
                break
        is_enough = suffices()
        for group in victims[:-1] if is_enough else ():
            freed.remove(group)
            plan.admit(group)
            if suffices():
                victims.remove(group)  # the others suffice
            else:
                freed.add(group)
                plan.release(group)
        for group in victims:  # until the caller preempts them, they run
            plan.admit(group)
        if not is_enough:
            self._futile[head.request_id] = missing
        return victims if is_enough else []

    def _is_known_to_be_futile(self, head: SequenceGroup, missing: Missing) -> bool:
        """Return whether the same or less did not suffice before, and no group has left the device since: groups that
        were admitted since took what they would free again."""
        if self._futile_since != self._registry.num_departures:
            self._futile_since = self._registry.num_departures
            self._futile.clear()
        known = self._futile.get(head.request_id)
        return known is not None and all(now >= then for now, then in zip(missing, known, strict=True))

    def clear_pins(self, group: SequenceGroup) -> bool:
        """End all pins for a group that could not run otherwise, even alone. Returns False when they held nothing."""
        num_held = self._block_manager.pins.clear()
        if num_held:
            self._registry.log.note(
                "unpinned", group.request, f"pins held {num_held} blocks, and it runs only without them"
            )
        return num_held > 0

    # ---- swap or recompute ----

    def _choose(self, group: SequenceGroup, plan: StepPlan | None, dropped: _Dropped) -> SwapChoice:
        manager = self._block_manager
        if self._mode == "recompute":
            return SwapChoice(False, "preemption_mode is recompute")
        if manager.limits.num_host_blocks == 0:
            return SwapChoice(False, "there is no swap space")
        if plan is None:
            return SwapChoice(False, "no step is being planned that could swap it out")
        if plan.swap_ins:
            return SwapChoice(False, "this step swaps in, and a step swaps out before it swaps in")
        if group.refork_at is not None:
            return SwapChoice(False, "it is computing its common prefix")
        if manager.releases_unseen and group.owes_prompt_results:
            return SwapChoice(False, "prompt_logprobs that are on their way may need tokens that left the window")
        if _may_branch(group) and self._is_past_known(group, dropped):
            return SwapChoice(False, "its states are past its last known token, which decides what follows")
        if manager.encodings.are_missing(manager.tables[s.seq_id] for s in group.live):
            return SwapChoice(False, "its sound is not encoded yet")
        shortage = manager.swap_space.swap_out_shortage(group.live)
        if shortage is not None:
            return SwapChoice(False, f"the swap space {shortage.because}")
        if self._mode == "swap":
            return SwapChoice(True, "preemption_mode is swap")
        if self._mode == "classic":
            count = group.max_running_sequences
            return SwapChoice(count > 1, f"{count} sequences may still run")
        return self._cheaper(group, manager)

    def _is_past_known(self, group: SequenceGroup, dropped: _Dropped) -> bool:
        """Return whether states have seen a group's last known token, so that what follows it is on its way."""
        computed = dropped.num_computed
        return self._block_manager.keeps_states and any(computed[s.seq_id] >= len(s.token_ids) for s in group.live)

    def _cheaper(self, group: SequenceGroup, manager: BlockManager) -> SwapChoice:
        """Compare the time to compute tokens again, without those that stay in the cache because others use them, with
        the time to move bytes out and in again; both at the rates measured so far."""
        num_blocks, num_bytes = manager.swap_space.num_computed_blocks(group.live)
        num_kept = manager.num_blocks_used_by_others(group.live)
        num_tokens = sum(sequence.num_computed_tokens for sequence in group.live)
        num_tokens -= (len(group.live) - 1) * min(group.num_prompt_tokens, num_tokens // len(group.live))
        recompute_s = max(0, num_tokens - num_kept * manager.block_size) / self._rates.prefill_tokens_per_s
        swap_s = 2 * num_bytes / self._rates.swap_bytes_per_s
        because = (
            f"{num_tokens} tokens, {num_kept} blocks of them shared, take {recompute_s * 1e3:.3g} ms to compute again, "
            f"{num_blocks} blocks {swap_s * 1e3:.3g} ms to move"
        )
        return SwapChoice(swap_s < recompute_s, because)


class _FreedBlocks:
    """Counts the device blocks of each cache group that would be free without some of the running groups."""

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self._num_users = [Counter[int]() for _ in manager.groups]
        self._counts = [0] * len(manager.groups)

    def covers(self, missing_blocks: Missing) -> bool:
        """Return whether so many blocks of each cache group would be free."""
        return all(count >= missing for count, missing in zip(self._counts, missing_blocks, strict=True))

    def add(self, group: SequenceGroup) -> None:
        """Count without this group too."""
        for cache, users in zip(self._manager.groups, self._num_users, strict=True):
            for block in self._manager.blocks_of(group.live, cache.index):
                users[block] += 1
                self._counts[cache.index] += users[block] == cache.pool.num_users(block)

    def remove(self, group: SequenceGroup) -> None:
        """Undo `add`."""
        for cache, users in zip(self._manager.groups, self._num_users, strict=True):
            for block in self._manager.blocks_of(group.live, cache.index):
                self._counts[cache.index] -= users[block] == cache.pool.num_users(block)
                users[block] -= 1


def _num_computed_tokens(group: SequenceGroup, computed: dict[int, int]) -> int:
    """Return the sum of the sequences' `computed` tokens; those of the prompt, whose blocks are shared, count once."""
    prompt, counts = group.num_prompt_tokens, [computed[sequence.seq_id] for sequence in group.live]
    return min(prompt, max(counts)) + sum(max(0, count - prompt) for count in counts)


def _may_branch(group: SequenceGroup) -> bool:
    """Return whether the results of a row may do more to the group than append a token or end a sequence."""
    has_form = group.request.params.structured_outputs is not None
    return has_form or group.beams is not None or not group.is_forked


def _origin(group: int, block: int, copied_from: dict[tuple[int, int], int]) -> int:
    """Return where the content of a block is before any of these copies is made; a copy may be made of a copy."""
    while (group, block) in copied_from:
        block = copied_from[group, block]
    return block
