"""The default way to fill a step: whoever runs goes on, and prompts, whole or in pieces, take what is left."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC

from octavo.core.sequence import SequenceGroup, SequenceStatus
from octavo.kv_cache.allocation import AllocStatus
from octavo.scheduler.admission import Admission
from octavo.scheduler.budget import AdapterBudget, PartialBudget, WholeBudget
from octavo.scheduler.decisions import DecisionLog
from octavo.scheduler.displacement import Displacement
from octavo.scheduler.plan import StepPlan
from octavo.scheduler.policy import Policy
from octavo.scheduler.rates import Rates
from octavo.scheduler.registry import Registry
from octavo.scheduler.rows import RowPlanner

_MOST_ASIDE = 16
"""Groups that one step looks past."""


class ContinuousPlanner:
    """Next tokens of running groups, then what running prompts lack, then swapped and preempted groups, then new ones.

    `rates` limit the prompt tokens of a step in which other sequences decode.

    `max_bypasses`: how many later groups may be let in before a waiting one that does not fit, while it stands first.
    0 is strict order. It bounds starvation: after that many, everybody behind waits until it fits.
    """

    def __init__(
        self,
        registry: Registry,
        rows: RowPlanner,
        admission: Admission,
        displacement: Displacement,
        policy: Policy,
        log: DecisionLog,
        rates: Rates,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_loras: int,
        max_bypasses: int,
    ) -> None:
        self._registry = registry
        self._rows = rows
        self._admission = admission
        self._displacement = displacement
        self._policy = policy
        self._log = log
        self._rates = rates
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_loras = max_loras
        self._max_bypasses = max_bypasses

    def plan(self, plan: StepPlan, now: float) -> None:
        """Fill `plan` for a step at time `now`."""
        tokens = PartialBudget(self._max_num_batched_tokens)
        tokens.for_prompts = 0
        prompts = self._rows.plan_running(plan, tokens)
        tokens.for_prompts = tokens.remaining
        if plan.rows and (prompts or len(self._registry.waiting) or len(self._registry.swapped)):
            tokens.for_prompts = self._rates.num_prompt_tokens_beside(len(plan.rows), tokens.remaining)
        outranked = self._outranked(now)
        self._plan_prompts([group for group in prompts if group not in outranked], plan, tokens)
        if outranked:
            self._admit_if_there_is_room(plan, tokens, now, outranked)
            self._plan_prompts(outranked, plan, tokens)
        self._admit_if_there_is_room(plan, tokens, now)

    def _plan_prompts(self, groups: SequenceABC[SequenceGroup], plan: StepPlan, tokens: PartialBudget) -> None:
        """Plan pieces for those of the groups that still run, in this order, as far as the tokens go."""
        for group in groups:
            if group.status is SequenceStatus.RUNNING and tokens.has_tokens_for_prompts:
                self._rows.plan_group(group, plan, tokens)

    def _outranked(self, now: float) -> list[SequenceGroup]:
        """Running groups whose prompts are not computed yet and come after the first of them, or of those that wait; in
        the policy's order."""
        if not self._policy.may_outrank:
            return []
        prompts = [group for group in self._registry.running if group.is_computing_prompt]
        if not prompts:
            return []
        head = self._registry.waiting.peek(now)
        place = {group: self._policy.place(group, now) for group in (prompts if head is None else [head, *prompts])}
        first = min(place, key=place.__getitem__)
        outranked = [group for group in prompts if self._policy.outranks(first, group, now)]
        return sorted(outranked, key=place.__getitem__)

    def _admit_if_there_is_room(
        self, plan: StepPlan, tokens: PartialBudget, now: float, before: SequenceABC[SequenceGroup] = ()
    ) -> None:
        registry = self._registry
        if (
            (len(registry.waiting) or len(registry.swapped))
            and tokens.has_tokens_for_prompts
            and not plan.has_preempted
        ):
            self._admit(plan, tokens, now, before)

    def _admit(self, plan: StepPlan, tokens: PartialBudget, now: float, before: SequenceABC[SequenceGroup]) -> None:
        """Let groups in that wait, on the host or without blocks, in order, until one does not fit, or does not outrank
        the first of `before`."""
        registry, block_size = self._registry, self._registry.block_manager.block_size
        policy = self._policy
        running = registry.running
        sequences = WholeBudget(self._max_num_seqs - registry.num_running_sequences)
        adapters = AdapterBudget(self._max_loras, (group.request.adapter for group in running))
        computing = plan.hashes_computed(block_size)
        aside: list[SequenceGroup] = []  # to be put back: blocked ones, and those whose prefix is being computed
        blocked: list[SequenceGroup] = []
        while tokens.has_tokens_for_prompts:
            swapped, group = registry.swapped.peek(now), registry.waiting.peek(now)
            if swapped is not None and (group is None or policy.place(swapped, now) < policy.place(group, now)):
                if before:
                    break
                # a step that preempted swaps nothing in; nor may the swapped ones be passed
                if plan.has_preempted:
                    break
                because = sequences.refusal(swapped.max_running_sequences) or adapters.refusal(swapped.request.adapter)
                if because:
                    self._log.note("blocked", swapped.request, because)
                    break
                status = self._admission.swap_in(swapped, plan, now)
                if status is AllocStatus.LATER:
                    break
                if status is AllocStatus.OK:
                    self._note_passed(blocked, swapped)
                    sequences.take(swapped.max_running_sequences)
                    adapters.take(swapped.request.adapter)
                    self._rows.plan_group(swapped, plan, tokens)
                    if self._must_not_wait(blocked):
                        break
                continue
            if group is None or (before and not policy.outranks(group, before[0], now)):
                break
            if sequences.remaining <= 0 and not policy.may_outrank:
                # nobody comes in, whatever it would find in the cache
                self._log.note("blocked", group.request, sequences.refusal(group.max_running_sequences))
                break
            hit = self._admission.find_prefix(group)
            if hit.missing is not None and hit.missing in computing:
                aside.append(registry.waiting.set_aside(now))  # this step computes what it needs: next time it is a hit
                continue
            allocation = self._admission.can_allocate(group, hit)
            if allocation.status is AllocStatus.NEVER:
                registry.waiting.pop(now)
                assert not group.has_output, "a request that has produced a token is never ignored"
                self._admission.refuse(group, allocation.because, now)
                continue
            because = allocation.because or sequences.refusal(group.max_running_sequences)
            because = because or adapters.refusal(group.request.adapter)
            if because:
                if self._displacement.make_way(group, allocation, sequences, adapters, plan, tokens):
                    continue
                if not blocked:
                    self._log.note("blocked", group.request, because)
                if len(blocked) == _MOST_ASIDE:
                    break
                blocked.append(registry.waiting.set_aside(now))
                if self._must_not_wait(blocked):
                    break
                continue
            registry.waiting.pop(now)
            self._note_passed(blocked, group)
            sequences.take(group.max_running_sequences)
            adapters.take(group.request.adapter)
            self._admission.allocate(group, hit, plan, now)
            self._rows.plan_group(group, plan, tokens)
            if group.live[0].seq_id in plan.rows:
                computing.update(plan.hashes_computed_by(group.live[0], block_size))
            if self._must_not_wait(blocked):
                break
        for group in aside + blocked:
            registry.waiting.put_back(group)

    def _note_passed(self, blocked: list[SequenceGroup], group: SequenceGroup) -> None:
        for passed in blocked:
            passed.num_passed += 1
            self._log.note("passed", passed.request, f"by {group.request_id}, time {passed.num_passed}")

    def _must_not_wait(self, blocked: list[SequenceGroup]) -> bool:
        """Has one of them been passed as often as it may be?"""
        return any(group.num_passed >= self._max_bypasses for group in blocked)
