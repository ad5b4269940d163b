"""The policy of vLLM's first engine: a step is all prefill or all decode, and prompts are computed whole.

Swapped groups come before waiting ones; recomputed groups wait in front; nothing is swapped in by a step that
preempted; `delay_factor` lets prompts gather. One difference: a request that has produced a token is never ignored.
"""

from __future__ import annotations

from octavo.core.sequence import SequenceGroup, SequenceStatus
from octavo.kv_cache.block_manager import AllocStatus
from octavo.scheduler.admission import Admission
from octavo.scheduler.budget import AdapterBudget, PartialBudget, WholeBudget
from octavo.scheduler.decisions import DecisionLog
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
        head = self._registry.waiting.peek(now)
        if not self._delay_factor or head is None or not self._registry.running:
            return True
        return now - head.request.arrival_time > self._delay_factor * self._last_prefill_s

    def _go_on_with_prompts(self, plan: StepPlan) -> None:
        """Groups that were let in and are not decoding yet: several sequences that compute their own tails again."""
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
            admission = self._admission.can_allocate(group, hit)
            if admission.status is AllocStatus.NEVER:
                registry.waiting.pop(now)
                assert not group.has_output, "a request that has produced a token is never ignored"
                self._admission.refuse(group, admission.because, now)
                continue
            if because := admission.because or sequences.refusal(group.max_running_sequences):
                self._log.note("blocked", group.request_id, because)
                break
            if because := adapters.refusal(group.request.adapter):
                self._log.note("blocked", group.request_id, because)
                without_slot.append(registry.waiting.pop(now))  # it waits for a slot; others may pass
                continue
            num_cached = len(hit.blocks) * registry.block_manager.block_size + hit.partial[1]
            num_tokens = len(group.live[0].token_ids) - num_cached
            # known tokens of a preempted group may exceed the budget: then it has a step of its own
            if num_tokens > tokens.remaining and (plan.rows or not group.was_preempted):
                self._log.note("blocked", group.request_id, f"{num_tokens} tokens, {tokens.remaining} are left")
                break
            registry.waiting.pop(now)
            sequences.take(group.max_running_sequences)
            adapters.take(group.request.adapter)
            self._admission.allocate(group, hit, plan, now)
            if num_tokens > tokens.remaining:
                tokens = PartialBudget(num_tokens)
            self._rows.plan_group(group, plan, tokens)
        for group in without_slot:
            registry.waiting.put_back(group)

    def _swap_in(self, plan: StepPlan, now: float) -> None:
        registry = self._registry
        tokens = PartialBudget(self._max_num_batched_tokens - sum(row.num_tokens for row in plan.rows.values()))
        sequences = WholeBudget(self._max_num_seqs - registry.num_running_sequences)
        adapters = AdapterBudget(self._max_loras, (group.request.adapter for group in registry.running))
        while tokens.remaining > 0 and (group := registry.swapped.peek(now)) is not None:
            because = sequences.refusal(group.max_running_sequences) or adapters.refusal(group.request.adapter)
            if because:
                self._log.note("blocked", group.request_id, because)
                return
            status = self._admission.swap_in(group, plan, now)
            if status is AllocStatus.LATER:
                return
            if status is AllocStatus.OK:
                sequences.take(group.max_running_sequences)
                adapters.take(group.request.adapter)
                self._rows.plan_group(group, plan, tokens)


def _gap(group: SequenceGroup, index: int) -> int:
    """Known tokens of a sequence that are not computed."""
    sequence = group.live[index]
    return len(sequence.token_ids) + sequence.num_pending - sequence.num_computed_tokens
