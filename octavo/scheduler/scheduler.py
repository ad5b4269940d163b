"""The scheduler: closes the gap between known and computed tokens of every sequence, within budgets and blocks.

Prefill, a piece of a prefill, decode and resumption are the same line: a row computes the next tokens of a sequence,
and draws when it reaches the last. Steps may be planned before earlier ones have returned; what is computed does not
depend on when they do.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

import msgspec

from octavo.core.limits import check_runs_alone
from octavo.core.messages import EngineCoreOutput, EngineCoreRequest, SchedulerStats, SequenceDelta
from octavo.core.outputs import RequestError
from octavo.core.sequence import Sequence, SequenceGroup, SequenceStatus
from octavo.core.step import ModelRunnerOutput, PromptLogprobs, RowOutput, SchedulerOutput, TokenLogprobs
from octavo.errors import RequestTooLarge
from octavo.kv_cache.block_manager import AllocStatus, BlockManager
from octavo.scheduler.budget import PartialBudget, WholeBudget
from octavo.scheduler.finish import finish_after
from octavo.scheduler.plan import StepPlan, new_sequence, scheduled_row
from octavo.scheduler.policy import FirstComeFirstServed, Policy
from octavo.scheduler.waiting_queue import WaitingQueue


class Scheduler:
    """Owns the groups and their blocks. `schedule` plans a step, `update` takes in the results of the oldest one."""

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: Policy | None = None,
    ) -> None:
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.policy = policy or FirstComeFirstServed()
        self.groups: dict[str, SequenceGroup] = {}
        self.waiting = WaitingQueue(self.policy.key)
        self.running: list[SequenceGroup] = []
        self.swapped: list[SequenceGroup] = []
        self._by_sequence: dict[int, tuple[SequenceGroup, Sequence]] = {}
        self._ended: list[EngineCoreOutput] = []
        self._released: list[Sequence] = []
        self._next_seq_id = 0
        self._next_arrival = 0
        self._stats = SchedulerStats(num_blocks=block_manager.pool.num_blocks)

    # ---- requests come and go ----

    def refusal(self, request: EngineCoreRequest) -> RequestError | None:
        """Why a request can never run here, even alone; None when it can."""
        try:
            check_runs_alone(
                len(request.prompt_token_ids),
                request.params.max_tokens or 1,
                request.params.n,
                max_num_seqs=self.max_num_seqs,
                num_blocks=self.block_manager.pool.num_blocks,
                block_size=self.block_manager.block_size,
            )
        except RequestTooLarge as error:
            return RequestError(str(error), field=error.field, code=error.code, is_client_error=True)
        return None

    def add(self, request: EngineCoreRequest) -> None:
        """Take a request in. One that can never run ends at once, with an output that says why."""
        assert request.request_id not in self.groups, f"request {request.request_id} is there already"
        error = self.refusal(request)
        if error is not None:
            self._ended.append(EngineCoreOutput(request_id=request.request_id, deltas=[], finished=True, error=error))
            return
        group = SequenceGroup(request, self._next_arrival, self._new_seq_id())
        self._next_arrival += 1
        self.groups[group.request_id] = group
        self._by_sequence[group.sequences[0].seq_id] = group, group.sequences[0]
        self.waiting.push(group)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests without an output. Unknown ids (finished in the meantime) are passed over."""
        for request_id in request_ids:
            group = self.groups.get(request_id)
            if group is not None:
                self._end_group(group, SequenceStatus.FINISHED_ABORTED)

    def stop_sequence(self, request_id: str, index: int) -> None:
        """End one sequence whose text met a stop string. No output follows, also when it was the last one."""
        group = self.groups.get(request_id)
        sequence = next((s for s in group.live if s.index == index), None) if group is not None else None
        if group is None or sequence is None:
            return
        if group.refork_at is not None and sequence is group.live[0] and len(group.live) > 1:
            self._preempt(group)  # it was computing the common prefix for its siblings: they start over
        self._end_sequence(group, sequence, SequenceStatus.FINISHED_STOPPED)
        if not group.live:
            self._end_group(group, SequenceStatus.FINISHED_STOPPED)

    def has_unfinished(self) -> bool:
        return bool(self.groups) or bool(self._ended)

    def take_ended(self) -> list[EngineCoreOutput]:
        """Final outputs of requests that ended without a step of their own."""
        ended, self._ended = self._ended, []
        return ended

    # ---- planning ----

    def schedule(self, now: float) -> SchedulerOutput | None:
        """Plan the next step at time `now` (seconds, monotonic). None when there is nothing to submit."""
        plan = StepPlan()
        tokens = PartialBudget(self.max_num_batched_tokens)
        self._plan_running(plan, tokens)
        if len(self.waiting) and tokens.remaining > 0 and not plan.has_preempted:
            self._admit_waiting(plan, tokens, now)
        if not plan.rows:
            return None
        block_size = self.block_manager.block_size
        for group, sequence, _, _, _ in plan.rows.values():
            if sequence.num_computed_tokens >= (sequence.num_published_blocks + 1) * block_size:
                self.block_manager.publish(sequence, group.request.cache_salt)
        finished_ids = [sequence.seq_id for sequence in self._released]
        for sequence in self._released:
            # one that was preempted may come back in this very step
            sequence.is_resident = sequence.seq_id in plan.rows
        self._released = []
        self._stats.num_steps += 1
        return plan.output(self._stats.num_steps, finished_ids)

    def _plan_running(self, plan: StepPlan, tokens: PartialBudget) -> None:
        index = 0
        while index < len(self.running) and tokens.remaining > 0:
            group = self.running[index]
            self._plan_group(group, plan, tokens)
            # a group that gave way has left the list, and the next one stands in its place
            if index < len(self.running) and self.running[index] is group:
                index += 1

    def _plan_group(self, group: SequenceGroup, plan: StepPlan, tokens: PartialBudget) -> None:
        """Rows for the group's sequences. When blocks run out, groups are preempted, at last this one."""
        if not group.is_forked and group.live[0].num_pending:
            return  # its n first tokens are on their way: it forks when they arrive
        if group.refork_at is not None:
            if group.live[0].num_computed_tokens < group.refork_at:
                self._plan_sequence(group, group.live[0], group.refork_at, plan, tokens)
                return
            self._refork(group)
        for sequence in group.live:
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
        growth = self.block_manager.append_slots(sequence, start, start + num_tokens)
        while growth is None:
            victim = self.policy.victim(self.running)
            self._preempt(victim, plan, tokens)
            plan.has_preempted = True
            if victim is group:
                return False
            growth = self.block_manager.append_slots(sequence, start, start + num_tokens)
        tokens.take(num_tokens)
        is_new = not sequence.is_resident
        message = new_sequence(group, sequence, self.block_manager.table(sequence)) if is_new else None
        row = scheduled_row(group, sequence, num_tokens, growth, is_new=is_new)
        plan.rows[sequence.seq_id] = group, sequence, row, message, growth.copies
        sequence.is_resident = True
        sequence.num_computed_tokens = start + num_tokens
        if row.num_samples:
            sequence.num_pending = pending + 1
        return True

    def _admit_waiting(self, plan: StepPlan, tokens: PartialBudget, now: float) -> None:
        """Let waiting groups in, in order, until one does not fit."""
        sequences = WholeBudget(self.max_num_seqs - sum(group.max_running_sequences for group in self.running))
        computing = plan.hashes_computed(self.block_manager.block_size)
        deferred: list[SequenceGroup] = []
        while tokens.remaining > 0 and not plan.has_preempted:
            group = self.waiting.peek()
            if group is None or not sequences.grant(group.max_running_sequences):
                break
            leader = group.live[0]
            has_siblings = len(group.live) > 1
            num_tokens = group.num_prompt_tokens if has_siblings else len(leader.token_ids)
            hit = self.block_manager.find_prefix(group, leader, num_tokens)
            if hit.missing is not None and hit.missing in computing:
                deferred.append(self.waiting.pop())  # this step computes what it needs: next time it is a hit
                continue
            admission = self.block_manager.can_allocate(group, hit, waive_watermark=not self.running)
            if admission.status is AllocStatus.LATER:
                break
            self.waiting.pop()
            if admission.status is AllocStatus.NEVER:
                self._ignore(group, admission.because, now)
                continue
            self.block_manager.allocate(leader, num_tokens, hit)
            sequences.take(group.max_running_sequences)
            group.refork_at = num_tokens if has_siblings else None
            self._start(group, now)
            self._plan_group(group, plan, tokens)
            if leader.seq_id in plan.rows:
                computing.update(plan.hashes_computed_by(leader, self.block_manager.block_size))
        for group in deferred:
            self.waiting.push(group)

    def _start(self, group: SequenceGroup, now: float) -> None:
        """Move an admitted group to the running ones, and count what it found in the cache."""
        cached = group.live[0].num_computed_tokens
        group.status = SequenceStatus.RUNNING
        for sequence in group.live:
            sequence.status = SequenceStatus.RUNNING
        insort(self.running, group, key=lambda g: g.arrival)
        if group.was_preempted:
            # of each sequence the newest token was not computed yet
            tails = sum(sequence.num_output_tokens - 1 for sequence in group.live)
            self._stats.num_recomputed_tokens += group.num_prompt_tokens + tails - cached
        else:
            self._stats.num_prompt_tokens += group.num_prompt_tokens
        self._stats.num_queried_tokens += len(group.live[0].token_ids)
        self._stats.num_cached_tokens += cached
        if group.metrics.first_scheduled_time is None:
            group.metrics.first_scheduled_time = now
            group.num_cached_tokens = cached

    def _refork(self, group: SequenceGroup) -> None:
        """The common prefix is there again: the siblings of the first live sequence take their share of its blocks."""
        leader = group.live[0]
        for sibling in group.live[1:]:
            self.block_manager.fork(leader, sibling)
            sibling.num_computed_tokens = leader.num_computed_tokens
            sibling.num_published_blocks = leader.num_published_blocks
        group.refork_at = None

    def _preempt(self, group: SequenceGroup, plan: StepPlan | None = None, tokens: PartialBudget | None = None) -> None:
        """Take a running group's blocks and rows away; it waits, and computes its known tokens again."""
        for sequence in group.live:
            dropped = plan.drop(sequence) if plan is not None else None
            if dropped is not None and tokens is not None:
                tokens.refund(dropped[2].num_tokens)
            is_unannounced = dropped is not None and dropped[3] is not None
            if sequence.is_resident and not is_unannounced:
                self._released.append(sequence)
            self.block_manager.free(sequence)
            sequence.restart()
            sequence.status = SequenceStatus.WAITING
        group.refork_at = None
        group.status = SequenceStatus.WAITING
        group.was_preempted = True
        group.metrics.num_preemptions += 1
        self._stats.num_preemptions += 1
        self.running.remove(group)
        self.waiting.push(group)

    def _ignore(self, group: SequenceGroup, because: str, now: float) -> None:
        """End a group that does not fit the whole pool. The door refuses such requests; this is the second lock."""
        assert not group.has_output, "a request that has produced a token is never ignored"
        group.metrics.finished_time = now
        self._ended.append(
            EngineCoreOutput(
                request_id=group.request_id,
                deltas=[],
                finished=True,
                error=RequestError(because, field="prompt", code="request_too_large", is_client_error=True),
                metrics=group.metrics,
            )
        )
        self._forget(group, SequenceStatus.FINISHED_IGNORED)

    # ---- results ----

    def update(self, output: ModelRunnerOutput, now: float) -> list[EngineCoreOutput]:
        """Take in the results of a step at time `now`: append tokens, fork, end sequences. One output per request."""
        outputs: dict[str, EngineCoreOutput] = {}
        for row in output.rows:
            group, sequence = self._by_sequence.get(row.seq_id, (None, None))
            if group is None or sequence is None or sequence.status.is_finished or sequence.epoch != row.epoch:
                continue  # ended or preempted in the meantime: what it drew is not needed, or drawn again
            if row.error is not None:
                outputs[group.request_id] = self._fail(group, row.error, now)
                continue
            prompt_logprobs = self._owed_prompt_logprobs(group, row.prompt_logprobs)
            if not row.samples and prompt_logprobs is None:
                continue
            result = outputs.get(group.request_id)
            if result is None:
                result = outputs[group.request_id] = EngineCoreOutput(
                    request_id=group.request_id,
                    deltas=[],
                    finished=False,
                    num_cached_tokens=group.num_cached_tokens,
                )
            if prompt_logprobs is not None:
                result.prompt_logprobs = prompt_logprobs
            if row.samples:
                if not group.has_output:
                    result.metrics = group.metrics  # the front may end the request by a stop string before we do
                result.deltas += self._take_samples(group, sequence, row, now)
            if not group.live:
                result.finished = True
                result.metrics = group.metrics
                self._end_group(group, SequenceStatus.FINISHED_STOPPED)
        return list(outputs.values())

    def _take_samples(
        self, group: SequenceGroup, sequence: Sequence, row: RowOutput, now: float
    ) -> list[SequenceDelta]:
        sequence.num_pending -= 1
        metrics = group.metrics
        if metrics.first_token_time is None:
            metrics.first_token_time = now
        metrics.last_token_time = now
        self._stats.num_generated_tokens += len(row.samples)
        if group.is_forked:
            return [self._append(group, sequence, row.samples[0].token)]
        self._fork(group, sequence)
        return [self._append(group, group.sequences[sample.index], sample.token) for sample in row.samples]

    def _fork(self, group: SequenceGroup, parent: Sequence) -> None:
        """The prompt is computed: all n sequences exist from here on, and share its blocks."""
        for index in range(1, group.request.params.n):
            child = parent.fork(self._new_seq_id(), index)
            self.block_manager.fork(parent, child)
            self._by_sequence[child.seq_id] = group, child
            group.sequences.append(child)
            group.live.append(child)
        group.is_forked = True

    def _append(self, group: SequenceGroup, sequence: Sequence, token: TokenLogprobs) -> SequenceDelta:
        sequence.token_ids.append(token.token_id)
        delta = SequenceDelta(index=sequence.index, token_ids=[token.token_id], logprobs=[token])
        finish = finish_after(group, sequence, token.token_id)
        if finish is not None:
            delta.finish_reason, delta.stop_reason = finish.status.value, finish.stop_reason
            self._end_sequence(group, sequence, finish.status)
            if not group.live:
                group.metrics.finished_time = group.metrics.last_token_time
        return delta

    def _owed_prompt_logprobs(self, group: SequenceGroup, got: PromptLogprobs | None) -> PromptLogprobs | None:
        """The part that has not gone out yet: a preempted prompt is computed twice, and reported once."""
        if got is None:
            return None
        tokens = got.tokens[max(0, group.num_prompt_logprobs_sent - got.first_position) :]
        if not tokens:
            return None
        first, group.num_prompt_logprobs_sent = (
            group.num_prompt_logprobs_sent,
            group.num_prompt_logprobs_sent + len(tokens),
        )
        return PromptLogprobs(first_position=first, tokens=tokens)

    def _fail(self, group: SequenceGroup, message: str, now: float) -> EngineCoreOutput:
        group.metrics.finished_time = now
        self._end_group(group, SequenceStatus.FINISHED_ERROR)
        return EngineCoreOutput(
            request_id=group.request_id, deltas=[], finished=True, error=RequestError(message), metrics=group.metrics
        )

    # ---- the end of sequences and groups ----

    def _end_sequence(self, group: SequenceGroup, sequence: Sequence, status: SequenceStatus) -> None:
        sequence.status = status
        group.live.remove(sequence)
        may_publish = group.status is SequenceStatus.RUNNING and group.refork_at is None
        if may_publish and status is not SequenceStatus.FINISHED_ERROR:
            self.block_manager.publish(sequence, group.request.cache_salt)
        self.block_manager.free(sequence)
        if sequence.is_resident:
            self._released.append(sequence)

    def _end_group(self, group: SequenceGroup, status: SequenceStatus) -> None:
        for sequence in list(group.live):
            self._end_sequence(group, sequence, status)
        if group.status is SequenceStatus.RUNNING:
            self.running.remove(group)
        else:
            self.waiting.remove(group)
        self._forget(group, status)

    def _forget(self, group: SequenceGroup, status: SequenceStatus) -> None:
        group.status = status
        del self.groups[group.request_id]
        for sequence in group.sequences:
            del self._by_sequence[sequence.seq_id]

    def _new_seq_id(self) -> int:
        self._next_seq_id += 1
        return self._next_seq_id

    # ---- looking in ----

    def stats(self) -> SchedulerStats:
        """A snapshot."""
        return msgspec.structs.replace(
            self._stats,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_swapped=len(self.swapped),
            num_used_blocks=self.block_manager.pool.num_used_blocks,
        )

    def check(self) -> None:
        """Prove that queues, groups and blocks agree. Raises AssertionError. For tests and for idle moments."""
        with_tables = [s for g in self.running for s in (g.live if g.refork_at is None else g.live[:1])]
        self.block_manager.check(with_tables)
        assert len(self.running) + len(self.waiting) == len(self.groups)
        assert [g.arrival for g in self.running] == sorted(g.arrival for g in self.running)
        assert {s.seq_id for g in self.groups.values() for s in g.sequences} == set(self._by_sequence)
