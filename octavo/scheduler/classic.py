"""The policy of vLLM's first engine: a step is all prefill or all decode, and prompts are computed whole.

Swapped groups come before waiting ones; recomputed groups wait in front (where the policy of the queue lets them);
nothing is swapped in by a step that preempted; `delay_factor` lets prompts gather. Two differences: a request that has
produced a token is never ignored, and one that is computed again and exceeds the budget by now takes several steps.
"""

from __future__ import annotations

from octavo.core.sequence import SequenceGroup, SequenceStatus
from octavo.kv_cache.allocation import AllocStatus
from octavo.scheduler.admission import Admission
from octavo.scheduler.budget import AdapterBudget, PartialBudget, WholeBudget
from octavo.scheduler.decisions import DecisionLog
from octavo.scheduler.displacement import Displacement
from octavo.scheduler.plan import StepPlan
from octavo.scheduler.registry import Registry
from octavo.scheduler.rows import RowPlanner


class ClassicPlanner:
    """`delay_factor`: prompts wait until the oldest has waited this many times as long as the last prefill took."""

    def __init__(
        self,
        registry: Registry,
        rows: RowPlanner,
        admission: Admission,
        displacement: Displacement,
        log: DecisionLog,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_loras: int,
        delay_factor: float,
    ) -> None:
        self._registry = registry
        self._rows = rows
        self._admission = admission
        self._displacement = displacement
        self._log = log
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_loras = max_loras
        self._delay_factor = delay_factor
        self._last_prefill_at: float | None = None
        self._last_prefill_s = 0.0

    def plan(self, plan: StepPlan, now: float) -> None:
        """Fill `plan` for a step at time `now`."""
        if self._last_prefill_at is not None:
            self._last_prefill_s, self._last_prefill_at = now - self._last_prefill_at, None
        self._go_on_with_prompts(plan)
        # who gave way in this step does not come back in it: those that run go on in between
        may_admit = not plan.rows and not plan.has_preempted and not len(self._registry.swapped)
        if may_admit and self._has_gathered(now):
            self._admit_prompts(plan, now)
        if plan.rows:
            self._last_prefill_at = now
            return
        self._rows.plan_running(plan, PartialBudget(self._max_num_batched_tokens))
        if not plan.has_preempted:
            self._swap_in(plan, now)

    def _has_gathered(self, now: float) -> bool:
        if not self._delay_factor or not self._registry.running:
            return True
        oldest = self._registry.oldest_waiting()
        return oldest is None or now - oldest.request.arrival_time > self._delay_factor * self._last_prefill_s

    def _go_on_with_prompts(self, plan: StepPlan) -> None:
        """Groups that were let in and are not decoding yet: sequences that compute their own tails again, and known
        tokens beyond the budget of a step."""
        tokens = PartialBudget(self._max_num_batched_tokens)
        for group in list(self._registry.running):
            if group.status is not SequenceStatus.RUNNING:
                continue  # it gave way to one before it
            if group.refork_at is not None or any(_gap(group, i) > 1 for i in range(len(group.live))):
                self._rows.plan_group(group, plan, tokens)

    def _admit_prompts(self, plan: StepPlan, now: float) -> None:
        """Let waiting groups in, whole prompts only, until one does not fit."""
        registry = self._registry
        tokens = PartialBudget(self._max_num_batched_tokens)
        running = registry.running
        sequences = WholeBudget(self._max_num_seqs - registry.num_running_sequences)
        adapters = AdapterBudget(self._max_loras, (group.request.adapter for group in running))
        without_slot: list[SequenceGroup] = []
        while (group := registry.waiting.peek(now)) is not None:
            hit = self._admission.find_prefix(group)
            allocation = self._admission.can_allocate(group, hit)
            if allocation.status is AllocStatus.NEVER:
                registry.waiting.pop(now)
                assert not group.has_output, "a request that has produced a token is never ignored"
                self._admission.refuse(group, allocation.because, now)
                continue
            no_slot = adapters.refusal(group.request.adapter)
            if because := no_slot or allocation.because or sequences.refusal(group.max_running_sequences):
                if self._displacement.make_way(group, allocation, sequences, adapters, plan, tokens):
                    continue
                self._log.note("blocked", group.request, because)
                if not no_slot:
                    break
                without_slot.append(registry.waiting.set_aside(now))  # it waits for a slot; others may pass
                continue
            num_cached = len(hit.blocks) * registry.block_manager.block_size + hit.partial[1]
            num_tokens = len(group.live[0].token_ids) - num_cached
            # known tokens of a preempted group may exceed the budget: then its steps are its own
            if num_tokens > tokens.remaining and (plan.rows or not group.was_preempted):
                self._log.note("blocked", group.request, f"{num_tokens} tokens, {tokens.remaining} are left")
                break
            registry.waiting.pop(now)
            sequences.take(group.max_running_sequences)
            adapters.take(group.request.adapter)
            self._admission.allocate(group, hit, plan, now)
            self._rows.plan_group(group, plan, tokens)
        for group in without_slot:
            registry.waiting.put_back(group)

    def _swap_in(self, plan: StepPlan, now: float) -> None:
        registry = self._registry
        tokens = PartialBudget(self._max_num_batched_tokens - sum(row.num_tokens for row in plan.rows.values()))
        sequences = WholeBudget(self._max_num_seqs - registry.num_running_sequences)
        adapters = AdapterBudget(self._max_loras, (group.request.adapter for group in registry.running))
        without_slot: list[SequenceGroup] = []
        while tokens.remaining > 0 and (group := registry.swapped.peek(now)) is not None:
            if because := adapters.refusal(group.request.adapter):
                self._log.note("blocked", group.request, because)
                without_slot.append(registry.swapped.set_aside(now))
                continue
            if because := sequences.refusal(group.max_running_sequences):
                self._log.note("blocked", group.request, because)
                break
            status = self._admission.swap_in(group, plan, now)
            if status is AllocStatus.LATER:
                break
            if status is AllocStatus.OK:
                sequences.take(group.max_running_sequences)
                adapters.take(group.request.adapter)
                self._rows.plan_group(group, plan, tokens)
        for group in without_slot:
            registry.swapped.put_back(group)


def _gap(group: SequenceGroup, index: int) -> int:
    """Known tokens of a sequence that are not computed."""
    sequence = group.live[index]
    return len(sequence.token_ids) + sequence.num_pending - sequence.num_computed_tokens
