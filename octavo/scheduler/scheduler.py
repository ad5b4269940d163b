"""The scheduler: closes the gap between known and computed tokens of every sequence, within budgets and blocks.

Prefill, a piece of a prefill, decode and resumption are the same line: a row computes the next tokens of a sequence,
and draws when it reaches the last. Steps may be planned before earlier ones have returned; what is computed does not
depend on when they do.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC

import msgspec

from octavo.config.schema import PreemptionMode
from octavo.core.limits import check_runs_alone
from octavo.core.messages import EngineCoreOutput, EngineCoreRequest, SchedulerStats
from octavo.core.outputs import RequestError
from octavo.core.sequence import Sequence, SequenceGroup, SequenceStatus
from octavo.core.step import ModelRunnerOutput, SchedulerOutput
from octavo.errors import RequestTooLarge
from octavo.kv_cache.block_manager import AllocStatus, BlockManager
from octavo.scheduler.budget import PartialBudget, WholeBudget
from octavo.scheduler.plan import StepPlan, new_sequence, scheduled_row
from octavo.scheduler.policy import FirstComeFirstServed, Policy
from octavo.scheduler.preemption import Preemption, PreemptionCosts
from octavo.scheduler.registry import Registry
from octavo.scheduler.results import Results
from octavo.scheduler.waiting_queue import WaitingQueue


class Scheduler:
    """`schedule` plans a step, `update` takes in the results of the oldest one."""

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: Policy | None = None,
        preemption_mode: PreemptionMode = "recompute",
        preemption_costs: PreemptionCosts | None = None,
        num_lookahead_slots: int = 0,
    ) -> None:
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_lookahead_slots = num_lookahead_slots
        self.policy = policy or FirstComeFirstServed()
        self._registry = Registry(block_manager, self.policy)
        self._preemption = Preemption(self._registry, preemption_mode, preemption_costs or PreemptionCosts())
        self._results = Results(self._registry)

    @property
    def groups(self) -> dict[str, SequenceGroup]:
        """Every request that has not ended, by id."""
        return self._registry.groups

    @property
    def waiting(self) -> WaitingQueue:
        """Groups without blocks."""
        return self._registry.waiting

    @property
    def running(self) -> list[SequenceGroup]:
        """Groups with blocks on the device, in order of arrival."""
        return self._registry.running

    @property
    def swapped(self) -> WaitingQueue:
        """Groups with blocks on the host."""
        return self._registry.swapped

    # ---- requests come and go ----

    def refusal(self, request: EngineCoreRequest) -> RequestError | None:
        """Why a request can never run here, even alone; None when it can."""
        try:
            check_runs_alone(
                len(request.prompt_token_ids),
                (request.params.max_tokens or 1) + self.num_lookahead_slots,
                request.params.width,
                max_num_seqs=self.max_num_seqs,
                num_blocks=self.block_manager.pool.num_blocks,
                block_size=self.block_manager.block_size,
                width_field=request.params.width_field,
            )
        except RequestTooLarge as error:
            return RequestError(str(error), field=error.field, code=error.code, is_client_error=True)
        return None

    def add(self, request: EngineCoreRequest) -> None:
        """Take a request in. One that can never run ends at once, with an output that says why."""
        assert request.request_id not in self.groups, f"request {request.request_id} is there already"
        error = self.refusal(request)
        if error is None:
            self._registry.add(request)
            return
        ended = EngineCoreOutput(request_id=request.request_id, deltas=[], finished=True, error=error)
        self._registry.ended.append(ended)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests without an output. Unknown ids (finished in the meantime) are passed over."""
        for request_id in request_ids:
            group = self.groups.get(request_id)
            if group is not None:
                self._registry.end_group(group, SequenceStatus.FINISHED_ABORTED)

    def stop_sequence(self, request_id: str, index: int) -> None:
        """End one sequence whose text met a stop string. No output follows, also when it was the last one."""
        group = self.groups.get(request_id)
        sequence = next((s for s in group.live if s.index == index), None) if group is not None else None
        if group is None or sequence is None:
            return
        if group.refork_at is not None and sequence is group.live[0] and len(group.live) > 1:
            self._preemption.preempt(group)  # it was computing the common prefix for its siblings: they start over
        self._registry.end_sequence(group, sequence, SequenceStatus.FINISHED_STOPPED)
        if not group.live:
            self._registry.end_group(group, SequenceStatus.FINISHED_STOPPED)

    def has_unfinished(self) -> bool:
        return bool(self.groups) or bool(self._registry.ended)

    def take_ended(self) -> list[EngineCoreOutput]:
        """Final outputs of requests that ended without a step of their own."""
        ended, self._registry.ended = self._registry.ended, []
        return ended

    def update(self, output: ModelRunnerOutput, now: float) -> list[EngineCoreOutput]:
        """Take in the results of the oldest step at time `now`: one output per request that has something to say."""
        return self._results.take(output, now)

    # ---- planning ----

    def schedule(self, now: float) -> SchedulerOutput | None:
        """Plan the next step at time `now` (seconds, monotonic). None when there is nothing to submit."""
        registry = self._registry
        plan = StepPlan()
        tokens = PartialBudget(self.max_num_batched_tokens)
        self._plan_running(plan, tokens)
        if (len(self.waiting) or len(self.swapped)) and tokens.remaining > 0 and not plan.has_preempted:
            self._admit(plan, tokens, now)
        if not plan.rows and not plan.swap_outs:
            return None
        block_size = self.block_manager.block_size
        for group, sequence, _, _, _ in plan.rows.values():
            if sequence.num_computed_tokens >= (sequence.num_published_blocks + 1) * block_size:
                self.block_manager.publish(sequence, group.request.cache_salt)
        finished_ids = [sequence.seq_id for sequence in registry.released]
        for sequence in registry.released:
            # one that was preempted may come back in this very step
            sequence.is_resident = sequence.seq_id in plan.rows
        registry.released = []
        registry.stats.num_steps += 1
        return plan.output(registry.stats.num_steps, finished_ids)

    def _plan_running(self, plan: StepPlan, tokens: PartialBudget) -> None:
        running = self.running
        index = 0
        while index < len(running) and tokens.remaining > 0:
            group = running[index]
            self._plan_group(group, plan, tokens)
            # a group that gave way has left the list, and the next one stands in its place
            if index < len(running) and running[index] is group:
                index += 1

    def _plan_group(self, group: SequenceGroup, plan: StepPlan, tokens: PartialBudget) -> None:
        """Rows for the group's sequences. When blocks run out, groups are preempted, at last this one."""
        if not group.is_forked and group.live[0].num_pending:
            return  # its first tokens are on their way: it forks when they arrive
        if group.refork_at is not None:
            if group.live[0].num_computed_tokens < group.refork_at:
                self._plan_sequence(group, group.live[0], group.refork_at, plan, tokens)
                return
            self._refork(group)
        is_beam = group.beams is not None
        for sequence in group.live:
            if is_beam and (sequence.num_pending or sequence.candidates is not None):
                continue  # the beams grow together: this one has what it needs, or will
            if not self._plan_sequence(group, sequence, len(sequence.token_ids) + sequence.num_pending, plan, tokens):
                return

    def _plan_sequence(
        self, group: SequenceGroup, sequence: Sequence, target: int, plan: StepPlan, tokens: PartialBudget
    ) -> bool:
        """A row that brings the sequence nearer to `target` computed tokens. False when the group had to give way."""
        pending = sequence.num_pending
        if pending and sequence.num_output_tokens + pending >= group.max_tokens:
            return True  # its last token is on its way
        start = sequence.num_computed_tokens
        num_tokens = tokens.grant(target - start)
        if num_tokens <= 0:
            return True
        append_slots, num_lookahead = self.block_manager.append_slots, self.num_lookahead_slots
        growth = append_slots(sequence, start, start + num_tokens, num_lookahead)
        while growth is None:
            victim = self.policy.victim(self.running)
            self._preemption.preempt(victim, plan, tokens)
            plan.has_preempted = True
            if victim is group:
                return False
            growth = append_slots(sequence, start, start + num_tokens, num_lookahead)
        tokens.take(num_tokens)
        is_new = not sequence.is_resident
        message = new_sequence(group, sequence, self.block_manager.table(sequence)) if is_new else None
        row = scheduled_row(group, sequence, num_tokens, growth, is_new=is_new)
        plan.rows[sequence.seq_id] = group, sequence, row, message, growth.copies
        sequence.is_resident = True
        sequence.num_computed_tokens = start + num_tokens
        if row.num_samples or row.num_candidates:
            sequence.num_pending = pending + 1
        return True

    def _refork(self, group: SequenceGroup) -> None:
        """The common prefix is there again: the siblings of the first live sequence take their share of its blocks."""
        leader = group.live[0]
        for sibling in group.live[1:]:
            self.block_manager.fork(leader, sibling)
            sibling.num_computed_tokens = leader.num_computed_tokens
            sibling.num_published_blocks = leader.num_published_blocks
        group.refork_at = None

    # ---- admission ----

    def _admit(self, plan: StepPlan, tokens: PartialBudget, now: float) -> None:
        """Let groups in that wait, on the host or without blocks, in order, until one does not fit."""
        sequences = WholeBudget(self.max_num_seqs - sum(group.max_running_sequences for group in self.running))
        computing = plan.hashes_computed(self.block_manager.block_size)
        deferred: list[SequenceGroup] = []
        while tokens.remaining > 0 and not plan.has_preempted:
            queue = self._first_queue()
            group = queue.peek()
            if group is None or not sequences.grant(group.max_running_sequences):
                break
            if queue is self.swapped:
                admission = self._swap_in(group, plan, now)
            else:
                admission = self._allocate(group, plan, computing, deferred, now)
            if admission is AllocStatus.LATER:
                break
            if admission is AllocStatus.NEVER or group.status is not SequenceStatus.RUNNING:
                continue  # it has left its queue
            sequences.take(group.max_running_sequences)
            self._plan_group(group, plan, tokens)
            for sequence in group.live:
                if sequence.seq_id in plan.rows:
                    computing.update(plan.hashes_computed_by(sequence, self.block_manager.block_size))
        for group in deferred:
            self.waiting.push(group)

    def _first_queue(self) -> WaitingQueue:
        """The queue whose head comes first."""
        swapped, waiting = self.swapped.peek(), self.waiting.peek()
        if swapped is None or (waiting is not None and self.policy.key(waiting) < self.policy.key(swapped)):
            return self.waiting
        return self.swapped

    def _swap_in(self, group: SequenceGroup, plan: StepPlan, now: float) -> AllocStatus:
        """Bring the head of the swapped queue back to the device."""
        manager, stats = self.block_manager, self._registry.stats
        admission = manager.can_swap_in(
            group.live, waive_watermark=not self.running, num_lookahead=self.num_lookahead_slots
        )
        if admission.status is AllocStatus.LATER:
            return admission.status
        self.swapped.pop()
        if admission.status is AllocStatus.NEVER:
            self._registry.refuse(group, admission.because, now)
            return admission.status
        moves = manager.swap_in(group.live)
        plan.swap_ins += moves
        stats.num_swapped_blocks += len(moves)
        self._registry.start(group)
        return admission.status

    def _allocate(
        self, group: SequenceGroup, plan: StepPlan, computing: set[bytes], deferred: list[SequenceGroup], now: float
    ) -> AllocStatus:
        """Give the head of the waiting queue its blocks, those of a cached prefix first."""
        leader = group.live[0]
        has_siblings = len(group.live) > 1
        num_tokens = common_prefix_length(group.live) if has_siblings else len(leader.token_ids)
        hit = self.block_manager.find_prefix(group, leader, num_tokens)
        if hit.missing is not None and hit.missing in computing:
            deferred.append(self.waiting.pop())  # this step computes what it needs: next time it is a hit
            return AllocStatus.OK
        admission = self.block_manager.can_allocate(group, hit, waive_watermark=not self.running)
        if admission.status is AllocStatus.LATER:
            return admission.status
        self.waiting.pop()
        if admission.status is AllocStatus.NEVER:
            assert not group.has_output, "a request that has produced a token is never ignored"
            self._registry.refuse(group, admission.because, now)
            return admission.status
        self.block_manager.allocate(leader, num_tokens, hit)
        group.refork_at = num_tokens if has_siblings else None
        self._registry.start(group)
        self._count_admission(group, now)
        return admission.status

    def _count_admission(self, group: SequenceGroup, now: float) -> None:
        cached, stats = group.live[0].num_computed_tokens, self._registry.stats
        if group.was_preempted:
            # of each sequence the newest token was not computed yet
            tails = sum(sequence.num_output_tokens - 1 for sequence in group.live)
            stats.num_recomputed_tokens += group.num_prompt_tokens + tails - cached
        else:
            stats.num_prompt_tokens += group.num_prompt_tokens
        stats.num_queried_tokens += len(group.live[0].token_ids)
        stats.num_cached_tokens += cached
        if group.metrics.first_scheduled_time is None:
            group.metrics.first_scheduled_time = now
            group.num_cached_tokens = cached

    # ---- looking in ----

    def stats(self) -> SchedulerStats:
        """A snapshot."""
        return msgspec.structs.replace(
            self._registry.stats,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_swapped=len(self.swapped),
            num_used_blocks=self.block_manager.pool.num_used_blocks,
            num_used_host_blocks=self.block_manager.host_pool.num_used_blocks,
        )

    def check(self) -> None:
        """Prove that queues, groups and blocks agree. Raises AssertionError. For tests and for idle moments."""
        self._registry.check()


def common_prefix_length(sequences: SequenceABC[Sequence]) -> int:
    """Leading tokens that all sequences share, without the last of the shortest: each draws after its own last."""
    shortest = min(sequences, key=lambda sequence: len(sequence.token_ids)).token_ids
    length = len(shortest) - 1
    for sequence in sequences:
        if sequence.token_ids[:length] != shortest[:length]:
            length = next(i for i in range(length) if sequence.token_ids[i] != shortest[i])
    return length
