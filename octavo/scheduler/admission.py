"""Admission: waiting groups get blocks, those of a cached prefix first, and swapped groups come back from the host."""

from __future__ import annotations

import enum
from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from typing import Final, NamedTuple

from octavo.config.schema import SchedulerConfig
from octavo.core.sequence import Sequence, SequenceGroup, SequenceStatus
from octavo.kv_cache.allocation import PrefixHit, Shortage
from octavo.scheduler.adapters import Adapters
from octavo.scheduler.budget import AdapterBudget
from octavo.scheduler.fetching import Fetching
from octavo.scheduler.plan import StepPlan
from octavo.scheduler.preemption import Preemption
from octavo.scheduler.registry import Registry
from octavo.scheduler.rows import RowPlanner
from octavo.scheduler.waiting_groups import WITH_ADAPTERS, AdapterState

_MOST_BLOCKED: Final = 16
"""How many groups that do not fit one step skips."""


class _Outcome(enum.Enum):
    """The outcome of an attempt to admit a group.

    ADMITTED: it runs. BLOCKED: it does not fit. CHANGED: others were preempted for it, and the head of the queue is
    looked at again. All others are passed by later groups in this step: DEFERRED, because another group fetches what it
    needs, or its adapter, of a swapped group, is read again; COMPUTING, because this step computes what it needs;
    NO_SLOT, because its adapter has no slot; UNREAD, because its adapter is not in memory.
    """

    ADMITTED = enum.auto()
    BLOCKED = enum.auto()
    DEFERRED = enum.auto()
    COMPUTING = enum.auto()
    NO_SLOT = enum.auto()
    UNREAD = enum.auto()
    CHANGED = enum.auto()


_PASSED: Final = (_Outcome.DEFERRED, _Outcome.COMPUTING, _Outcome.NO_SLOT, _Outcome.UNREAD)


class _Attempt(NamedTuple):
    """The outcome of admitting a group, and why it is blocked."""

    outcome: _Outcome
    because: str = ""


class Admission:
    """The loop that admits groups to a step, in the policy's order.

    Later groups pass, and are admitted before,
    - one that does not fit, at most `config.max_bypasses` times; then all behind it wait until it fits, which bounds
      starvation. 0 is strict order. A swapped group is never passed so.
    - one that lacks a slot for its adapter, without a bound, if they have no adapter: the step looks at no other
      waiting group with one.
    - those whose adapter is not in memory, without a bound: the step looks at the first of them.

    Where prompts are computed whole (no chunked prefill), the order is strict, and a prompt needs tokens for all that
    is not cached. Only groups that lack a slot, which all others pass, or blocks that another one fetches are passed.
    """

    def __init__(
        self,
        registry: Registry,
        rows: RowPlanner,
        preemption: Preemption,
        config: SchedulerConfig,
        fetching: Fetching | None,
        adapters: Adapters | None,
    ) -> None:
        self._fetching = fetching
        self._adapters = adapters
        self._registry = registry
        self._block_manager = registry.block_manager
        self._rows = rows
        self._preemption = preemption
        self._whole_prompts = not config.enable_chunked_prefill
        self._max_num_seqs = config.max_num_seqs
        self._max_bypasses = 0 if self._whole_prompts else config.max_bypasses

    def admit(self, plan: StepPlan, now: float, next_group: Callable[[], SequenceGroup | None]) -> None:
        """Admit groups at time `now`, each the one that `next_group` returns (the head of a queue, or None to stop),
        until no tokens for prompts are left or a group that may not be passed does not fit."""
        if plan.adapter_waits:
            self._registry.waiting.pass_over(WITH_ADAPTERS)
        deferred: list[SequenceGroup] = []
        blocked: list[SequenceGroup] = []
        num_computing = 0
        computing = set[bytes]() if self._whole_prompts else plan.digests_computed(self._block_manager)
        while not plan.tokens.is_full and (group := next_group()) is not None:
            if group.status is SequenceStatus.SWAPPED:
                outcome, because = self._swap_in(group, plan, now)
            else:
                outcome, because = self._admit(group, plan, now, computing)
            if because and not blocked:
                self._registry.log.note("blocked", group.request, because)
            if outcome in _PASSED:
                self._pass(group, outcome, plan, deferred)
                num_computing += outcome is _Outcome.COMPUTING
                if num_computing == self._max_num_seqs:
                    break  # in the next step they run: for those behind no sequence is left
            elif outcome is _Outcome.BLOCKED:
                if not self._may_pass_blocked(group, plan) or len(blocked) == _MOST_BLOCKED:
                    break
                blocked.append(group)
                self._registry.waiting.remove(group)
            elif outcome is _Outcome.ADMITTED:
                self._start(group, plan, computing)
                self._note_passed(blocked, group)
                if any(each.num_passed >= self._max_bypasses for each in blocked):
                    break
        for group in deferred + blocked:
            self._registry.queue_of(group).push(group)
        self._registry.waiting.look_at_all()

    def _may_pass_blocked(self, group: SequenceGroup, plan: StepPlan) -> bool:
        """Return whether groups behind one that does not fit are looked at."""
        may_be_passed = group.status is not SequenceStatus.SWAPPED and group.num_passed < self._max_bypasses
        return may_be_passed and (not plan.is_full or self._registry.policy.may_outrank)

    def _pass(self, group: SequenceGroup, outcome: _Outcome, plan: StepPlan, deferred: list[SequenceGroup]) -> None:
        """Skip a group in this step, and all others that its adapter keeps from running."""
        waiting, adapter = self._registry.waiting, group.request.adapter
        if outcome is _Outcome.NO_SLOT and not self._whole_prompts:
            plan.adapter_waits = True
            waiting.pass_over(WITH_ADAPTERS)
        if outcome in (_Outcome.DEFERRED, _Outcome.COMPUTING) or group.status is SequenceStatus.SWAPPED:
            deferred.append(group)
            self._registry.queue_of(group).remove(group)
        elif adapter is not None and not plan.adapter_waits:
            if outcome is _Outcome.NO_SLOT:
                waiting.set_state(adapter, AdapterState.NO_SLOT)
            waiting.pass_over([waiting.state_of(adapter)])

    def _start(self, group: SequenceGroup, plan: StepPlan, computing: set[bytes]) -> None:
        had_free_slots = plan.has_free_slots
        plan.admit(group)
        if group.request.adapter is not None:
            self._registry.waiting.set_state(group.request.adapter, AdapterState.READY)  # it has a slot now
            if had_free_slots and not plan.has_free_slots:
                self._registry.waiting.look_at_all()  # a group whose adapter is read lacks a slot, too, from here on
        if group.status is SequenceStatus.FETCHING:
            return  # it runs when its blocks are there
        self._rows.plan_group(group, plan)
        if not self._whole_prompts and group.live[0].seq_id in plan.rows:
            computing.update(plan.digests_computed_by(group.live[0], self._block_manager))

    def _note_passed(self, blocked: list[SequenceGroup], group: SequenceGroup) -> None:
        for passed in blocked:
            passed.num_passed += 1
            self._registry.log.note("passed", passed.request, f"by {group.request_id}, time {passed.num_passed}")

    # ---- one group ----

    def _admit(self, group: SequenceGroup, plan: StepPlan, now: float, computing: set[bytes]) -> _Attempt:
        """Give the first waiting group blocks, if all budgets grant it and the blocks are free."""
        refused = self._budget_refusal(group, plan)
        may_preempt = self._registry.policy.may_outrank
        no_slot = refused if refused is not None and refused.outcome is _Outcome.NO_SLOT else None
        if refused is not None and not may_preempt and (plan.is_full or no_slot):
            return refused  # whatever it would find in the cache
        if (refused is None or no_slot) and (because := self._read_refusal(group, may_preempt=no_slot is not None)):
            return no_slot or _Attempt(_Outcome.UNREAD, because)
        hit = self._ready_prefix(group, computing)
        if isinstance(hit, _Attempt):
            return no_slot or hit
        shortage = self._without_pins(group, lambda: self._shortage(group, hit))
        if refused is None and shortage is not None:
            refused = _Attempt(_Outcome.BLOCKED, shortage.because)
        if refused is not None:
            has_room_now = self._preemption.preempt_for(group, () if shortage is None else shortage.num_missing, plan)
            return _Attempt(_Outcome.CHANGED) if has_room_now else refused
        if because := self._token_refusal(group, hit, plan):
            return _Attempt(_Outcome.BLOCKED, because)
        self.allocate(group, hit, plan, now)
        return _Attempt(_Outcome.ADMITTED)

    def _ready_prefix(self, group: SequenceGroup, computing: set[bytes]) -> PrefixHit | _Attempt:
        """Return what the group finds in the cache, or, where it soon finds more, the outcome of this attempt."""
        hit = self.find_prefix(group)
        if hit.missing in computing:  # this step computes what it needs: in the next one it is a hit
            return _Attempt(_Outcome.COMPUTING)
        if self._fetching is not None and self._fetching.is_coming(group, hit):
            return _Attempt(_Outcome.DEFERRED)
        return hit

    def _swap_in(self, group: SequenceGroup, plan: StepPlan, now: float) -> _Attempt:
        """Bring the head of the swapped queue back to the device, if all budgets grant it and the blocks are free."""
        if any(sequence.num_pending for sequence in group.live):
            return _Attempt(_Outcome.BLOCKED, "tokens that it drew before it was swapped out are on their way")
        if (refused := self._budget_refusal(group, plan)) is not None:
            return refused
        if because := self._adapter_refusal(group, plan):
            return _Attempt(_Outcome.DEFERRED, because)
        shortage = self._without_pins(group, lambda: self._swap_in_shortage(group))
        if shortage is not None:
            return _Attempt(_Outcome.BLOCKED, shortage.because)
        moves = self._block_manager.swap_in(group.live)
        plan.swap_ins += moves
        if self._adapters is not None:
            self._adapters.assign(group)
        self._registry.swap_in(group, now)
        self._registry.log.note("swapped_in", group.request, f"{len(moves)} blocks")
        return _Attempt(_Outcome.ADMITTED)

    def _budget_refusal(self, group: SequenceGroup, plan: StepPlan) -> _Attempt | None:
        budget = plan.lacking(group)
        if budget is None:
            return None
        lacks_slot = isinstance(budget, AdapterBudget)
        return _Attempt(_Outcome.NO_SLOT if lacks_slot else _Outcome.BLOCKED, budget.reason(group))

    def _adapter_refusal(self, group: SequenceGroup, plan: StepPlan) -> str:
        """Return why the adapter of a swapped group keeps it from running now, though there is a slot; an empty string
        for no reason."""
        if plan.adapter_waits and group.request.adapter is not None:
            return "another request waits for a slot for its adapter before it"
        return "" if self._adapters is None else self._adapters.make_ready(group)

    def _read_refusal(self, group: SequenceGroup, *, may_preempt: bool) -> str:
        """Return why a waiting group's adapter is not in memory; an empty string when it is. may_preempt: the group
        lacks a slot and may preempt those that have one, which run on until its adapter has been read."""
        if self._adapters is None:
            return ""
        policy, running = self._registry.policy, self._registry.running
        has_victims = may_preempt and bool(policy.victims_for(group, running))
        return self._adapters.make_ready(group, may_preempt=has_victims)

    def _token_refusal(self, group: SequenceGroup, hit: PrefixHit, plan: StepPlan) -> str:
        """Return why the group's first row cannot be planned now; an empty string when it can."""
        start, want = hit.num_tokens, len(group.live[0].token_ids) - hit.num_tokens
        granted = plan.grant(group, start, want)
        # known tokens of a preempted group may exceed the budget: then its steps are its own
        needs_all = self._whole_prompts and (plan.rows or not group.was_preempted)
        return f"{want} tokens, {granted} are left" if granted < (want if needs_all else 1) else ""

    # ---- blocks ----

    def find_prefix(self, group: SequenceGroup) -> PrefixHit:
        """Return what a waiting group finds in the cache.

        When nothing runs and the pool has no room for the block to copy from beside the group's own, there is no copy:
        no other group would ever free it.
        """
        hit = self._block_manager.find_prefix(group, group.live[0], tokens_to_allocate(group))
        if hit.sources and not self._registry.on_device and self._shortage(group, hit) is not None:
            return hit.without_copy("no block is left to copy the beginning of the next from")
        return hit

    def _shortage(self, group: SequenceGroup, hit: PrefixHit) -> Shortage | None:
        is_returning, is_idle = group.metrics.num_preemptions > 1, not self._registry.on_device
        return self._block_manager.shortage(group, hit, waive_watermark=is_idle, is_returning=is_returning)

    def _swap_in_shortage(self, group: SequenceGroup) -> Shortage | None:
        is_idle = not self._registry.on_device
        return self._block_manager.swap_space.swap_in_shortage(group.live, waive_watermark=is_idle)

    def _without_pins(self, group: SequenceGroup, find: Callable[[], Shortage | None]) -> Shortage | None:
        """Return what `find` returns; when nothing runs and pins hold what the group lacks, all pins end before."""
        shortage = find()
        must_wait = shortage is not None and not self._registry.on_device
        return find() if must_wait and self._preemption.clear_pins(group) else shortage

    def allocate(self, group: SequenceGroup, hit: PrefixHit, plan: StepPlan, now: float) -> None:
        """Give blocks to a waiting group, and let it run."""
        if self._adapters is not None:
            self._adapters.assign(group)
        first, num_tokens = group.live[0], tokens_to_allocate(group)
        num_fetched = 0 if self._fetching is None else self._fetching.find(group, hit, num_tokens)
        if num_fetched:
            hit = hit.without_copy(hit.because)
        copies = self._block_manager.allocate(first, num_tokens, hit, num_fetched)
        first.num_computed_tokens = hit.num_tokens
        if copies:
            plan.prefix_copies[first.seq_id] = copies
        group.refork_at = num_tokens if len(group.live) > 1 else None
        self._registry.admit(group, hit.because, now)
        because = f"; {hit.because}" if hit.because else ""
        self._registry.log.note(
            "admitted", group.request, f"{hit.num_tokens} of {num_tokens} tokens were in the cache{because}"
        )
        if num_fetched and self._fetching is not None:
            self._fetching.begin(group, hit.num_blocks, num_fetched)


def tokens_to_allocate(group: SequenceGroup) -> int:
    """Return how many tokens the first live sequence computes for itself, or for all its siblings."""
    return common_prefix_length(group.live) if len(group.live) > 1 else len(group.live[0].token_ids)


def common_prefix_length(sequences: SequenceABC[Sequence]) -> int:
    """Return how many leading tokens all sequences share, without the last of the shortest: each draws after its own
    last."""
    shortest = min(sequences, key=lambda sequence: len(sequence.token_ids)).token_ids
    length = len(shortest) - 1
    for sequence in sequences:
        if sequence.token_ids[:length] != shortest[:length]:
            length = next(i for i in range(length) if sequence.token_ids[i] != shortest[i])
    return length
