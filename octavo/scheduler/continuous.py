"""The default way to fill a step: running sequences continue, and prompts, whole or in chunks, take what is left."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from typing import Final

from octavo.config.schema import SchedulerConfig
from octavo.core.sequence import SequenceGroup, SequenceStatus
from octavo.scheduler.admission import Admission
from octavo.scheduler.plan import StepPlan, begin_plan
from octavo.scheduler.rates import Rates
from octavo.scheduler.registry import Registry
from octavo.scheduler.rows import RowPlanner

_SMALLEST_PIECE: Final = 256
"""Smallest chunk, in prompt tokens, when pipeline stages share prompts: a smaller step mostly reads weights."""


class ContinuousPlanner:
    """Plans next tokens of running groups, then chunks of running prompts, swapped and preempted groups, and new ones.

    `rates` limit the prompt tokens of a step in which other sequences decode.
    """

    def __init__(
        self, registry: Registry, rows: RowPlanner, admission: Admission, rates: Rates, config: SchedulerConfig
    ) -> None:
        self._registry = registry
        self._rows = rows
        self._admission = admission
        self._rates = rates
        self._config = config

    def plan(self, now: float) -> StepPlan:
        """Return the plan of a step at time `now`."""
        plan = begin_plan(self._config, self._registry)
        tokens = plan.tokens
        tokens.for_prompts = 0
        prompts = self._rows.plan_running(plan)
        tokens.for_prompts = tokens.remaining
        if plan.rows and (prompts or self._registry.has_queued):
            tokens.for_prompts = self._rates.num_prompt_tokens_beside(len(plan.rows), tokens.remaining)
            plan.num_allowed_prompt_tokens = tokens.for_prompts
        if self._rows.num_microbatches > 1:
            tokens.for_prompts = min(tokens.for_prompts, self._num_prompt_tokens_per_step(prompts))
        outranked = self._outranked(now) if self._registry.policy.may_outrank else []
        self._plan_prompts([group for group in prompts if group not in outranked], plan)
        if outranked:
            self._admit(plan, now, before=outranked[0])
            self._plan_prompts(outranked, plan)
        if not any(_lacks_room(group, plan) for group in prompts):
            self._admit(plan, now)
        return plan

    def _num_prompt_tokens_per_step(self, prompts: SequenceABC[SequenceGroup]) -> int:
        """Return the prompt tokens of a step when all steps in flight have an equal part, unless that is small."""
        num_tokens = self._registry.num_queued_tokens + sum(group.num_prompt_tokens for group in prompts)
        return max(_SMALLEST_PIECE, -(-num_tokens // self._rows.num_microbatches))

    def _plan_prompts(self, groups: SequenceABC[SequenceGroup], plan: StepPlan) -> None:
        """Plan chunks for those of the groups that still run, in this order, as far as the tokens go."""
        for group in groups:
            if group.status is SequenceStatus.RUNNING and not plan.tokens.is_full:
                self._rows.plan_group(group, plan)

    def _outranked(self, now: float) -> list[SequenceGroup]:
        """Return the running groups whose prompts are not computed yet and come after the first of them, or of those
        that wait; in the policy's order."""
        registry, policy = self._registry, self._registry.policy
        prompts = [group for group in registry.running if group.is_computing_prompt]
        if not prompts:
            return []
        head = registry.waiting.peek(now)
        place = {group: policy.place(group, now) for group in (prompts if head is None else [head, *prompts])}
        first = min(place, key=place.__getitem__)
        outranked = [group for group in prompts if policy.outranks(first, group, now)]
        return sorted(outranked, key=place.__getitem__)

    def _admit(self, plan: StepPlan, now: float, before: SequenceGroup | None = None) -> None:
        """Admit groups that wait, on the host or without blocks, in the policy's order; with `before`, a running group,
        only waiting ones that outrank it. A step that preempted for a block admits none."""
        registry, policy = self._registry, self._registry.policy

        def next_group() -> SequenceGroup | None:
            swapped, waiting = registry.swapped.peek(now), registry.waiting.peek(now)
            if swapped is not None and (waiting is None or policy.place(swapped, now) < policy.place(waiting, now)):
                # a step that preempted swaps nothing in
                return None if before is not None or plan.has_preempted else swapped
            if waiting is not None and before is not None and not policy.outranks(waiting, before, now):
                return None
            return waiting

        if self._registry.has_queued and not plan.has_preempted:
            self._admission.admit(plan, now, next_group)


def _lacks_room(group: SequenceGroup, plan: StepPlan) -> bool:
    """Return whether a running prompt has no row though tokens are left: those that attend to each other need more.
    They wait until others end, and new ones would take the tokens of these."""
    is_waiting = group.status is SequenceStatus.RUNNING and group.live[0].seq_id not in plan.rows
    return is_waiting and not plan.tokens.is_full and any(each.is_whole for each in group.request.media)
