"""The policy of vLLM's first engine: a step is all prefill or all decode, and prompts are computed whole.

Swapped groups come before waiting ones; recomputed groups wait in front (where the policy of the queue allows it);
nothing is swapped in by a step that preempted; with `delay_factor` prompts gather. Two differences: a request that has
produced a token is never ignored, and one that is computed again and exceeds the budget by now takes several steps.
"""

from __future__ import annotations

from octavo.config.schema import SchedulerConfig
from octavo.core.sequence import SequenceStatus
from octavo.scheduler.admission import Admission
from octavo.scheduler.plan import StepPlan, begin_plan
from octavo.scheduler.registry import Registry
from octavo.scheduler.rows import RowPlanner


class ClassicPlanner:
    """With `config.delay_factor`, prompts wait until the oldest has waited that many times as long as the last prefill
    took."""

    def __init__(self, registry: Registry, rows: RowPlanner, admission: Admission, config: SchedulerConfig) -> None:
        self._registry = registry
        self._rows = rows
        self._admission = admission
        self._config = config
        self._last_prefill_at: float | None = None
        self._last_prefill_s = 0.0

    def plan(self, now: float) -> StepPlan:
        """Return the plan of a step at time `now`."""
        registry, plan = self._registry, begin_plan(self._config, self._registry)
        if self._last_prefill_at is not None:
            self._last_prefill_s, self._last_prefill_at = now - self._last_prefill_at, None
        self._continue_prompts(plan)
        # a group that was preempted in this step is not admitted in it: those that run continue in between
        may_admit = not plan.rows and not plan.has_preempted and not len(registry.swapped)
        if may_admit and self._has_gathered(now):
            self._admission.admit(plan, now, lambda: registry.waiting.peek(now))
        if plan.rows:
            self._last_prefill_at = now
            return plan
        self._rows.plan_running(plan)
        if not plan.has_preempted:
            self._admission.admit(plan, now, lambda: registry.swapped.peek(now))
        return plan

    def _has_gathered(self, now: float) -> bool:
        if not self._config.delay_factor or not self._registry.running:
            return True
        oldest = self._registry.oldest_waiting()
        return oldest is None or now - oldest.request.arrival_time > self._config.delay_factor * self._last_prefill_s

    def _continue_prompts(self, plan: StepPlan) -> None:
        """Plan groups that were admitted and are not decoding yet: sequences that compute their own tails again, and
        known tokens beyond the budget of a step."""
        for group in list(self._registry.running):
            if group.status is not SequenceStatus.RUNNING:
                continue  # it was preempted for an earlier group
            if group.refork_at is not None or any(s.num_tokens - s.num_computed_tokens > 1 for s in group.live):
                self._rows.plan_group(group, plan)
