"""Every accepted request that has not ended, its place (waiting, running, swapped), and the counts that follow from it.

Other parts of the scheduler decide; every change of a group's place is made here, and so are statistics, timelines,
final outputs without a step, and the list of sequences that the worker has to release.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Container, Iterator
from collections.abc import Sequence as SequenceABC
from typing import Final

from octavo.core.messages import EngineCoreOutput, EngineCoreRequest, RequestTimeline, SchedulerStats
from octavo.core.sequence import Sequence, SequenceGroup, SequenceStatus
from octavo.kv_cache.block_manager import BlockManager
from octavo.kv_transfer.connector import Connector
from octavo.scheduler.decisions import DecisionLog
from octavo.scheduler.fair_queueing import VirtualTime
from octavo.scheduler.policy import Policy
from octavo.scheduler.waiting_groups import WaitingGroups
from octavo.scheduler.waiting_queue import WaitingQueue

NUM_TIMELINES: Final = 256
"""Ended requests whose timelines are kept."""

_ON_DEVICE: Final = (SequenceStatus.RUNNING, SequenceStatus.FETCHING)
_HOW_ENDED: Final = {
    SequenceStatus.FINISHED_ABORTED: "aborted",
    SequenceStatus.FINISHED_ERROR: "failed",
}


class Registry:
    """The groups by id and by place.

    waiting: groups without blocks, new ones and preempted ones.
    running: groups with blocks on the device, in order of arrival.
    swapped: groups whose blocks are on the host.
    fetching: groups whose blocks on the device are being fetched, by the id of the fetch.
    num_running_sequences: most sequences that the running groups and those being fetched can still run at once.
    num_departures: how often a group has left the running ones.
    held: groups that have never run, while `holds_new`: they are not among the waiting ones.
    num_queued_tokens: prompt tokens of the waiting and held groups that have never run.
    timelines: those of the most recently finished requests.
    policy: the order of `waiting`, and whom a group outranks. log: the last decisions and their reasons.
    waits_for_results: every group waits for results.
    has_media: a prompt with images or sounds has arrived.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        policy: Policy,
        *,
        waits_for_results: bool = False,
        connector: Connector | None = None,
    ) -> None:
        """connector: is told which requests arrive and end."""
        self.block_manager = block_manager
        self.policy = policy
        self.log = DecisionLog()
        self._connector = connector
        self.groups: dict[str, SequenceGroup] = {}
        self.waiting = WaitingGroups(policy)
        self.running: list[SequenceGroup] = []
        self.swapped = WaitingQueue(policy.key)
        self.fetching: dict[int, SequenceGroup] = {}
        self.held: dict[str, SequenceGroup] = {}
        self.holds_new = False
        self.num_running_sequences = 0
        self.num_departures = 0
        self.num_queued_tokens = 0
        self.has_media = False
        self.stats = SchedulerStats(
            num_blocks=block_manager.limits.num_blocks, num_host_blocks=block_manager.limits.num_host_blocks
        )
        self.timelines: deque[RequestTimeline] = deque(maxlen=NUM_TIMELINES)
        self._waits_for_results = waits_for_results
        self._by_sequence: dict[int, tuple[SequenceGroup, Sequence]] = {}
        self._released: list[Sequence] = []
        self._ended: list[EngineCoreOutput] = []
        self._virtual_time = VirtualTime()
        self._num_seq_ids = 0

    # ---- requests arrive ----

    def new_groups(self, requests: SequenceABC[EngineCoreRequest]) -> list[SequenceGroup]:
        """Return groups for requests that arrive together. They belong to the registry once they are added."""
        made = []
        for request, virtual_start in zip(requests, self._virtual_time.starts(requests), strict=True):
            seq_id = self._new_seq_id()
            group = SequenceGroup(request, seq_id, seq_id, virtual_start)
            group.waits_for_results |= self._waits_for_results
            if request.resumed:
                group.resume([seq_id, *(self._new_seq_id() for _ in request.resumed[1:])])
            made.append(group)
        return made

    def add(self, group: SequenceGroup) -> None:
        """Put a new group into the waiting queue."""
        self.groups[group.request_id] = group
        self.has_media |= bool(group.request.media)
        self._by_sequence.update((sequence.seq_id, (group, sequence)) for sequence in group.sequences)
        if not group.was_preempted:
            self.num_queued_tokens += group.num_prompt_tokens
        self.policy.note_arrival(group)
        if self.holds_new and not group.was_preempted:
            self.held[group.request_id] = group
        else:
            self.waiting.push(group)
        if self._connector is not None and len(group.live) == 1 and group.may_read_prefix_cache:
            digests = self.block_manager.transfer_digests(group.live[0], group.request.cache_key)
            self._connector.added(group.request, digests)

    def hold_new(self, is_on: bool) -> None:
        """Hold groups that have never run, those that wait and those that arrive, or let them wait like all others."""
        self.holds_new = is_on
        waiting = [each for each in self.groups.values() if each.status is SequenceStatus.WAITING]
        for group in waiting if is_on else ():
            if not group.was_preempted and group.request_id not in self.held:
                self.waiting.remove(group)
                self.held[group.request_id] = group
        if not is_on:
            for group in self.held.values():
                self.waiting.push(group)
            self.held.clear()

    # ---- lookups ----

    def find(self, seq_id: int) -> tuple[SequenceGroup | None, Sequence | None]:
        """Return the group and the sequence with this id; None, None when it has ended."""
        return self._by_sequence.get(seq_id, (None, None))

    def group_of(self, seq_id: int) -> SequenceGroup:
        """Return the group of a sequence that has not ended."""
        return self._by_sequence[seq_id][0]

    def queue_of(self, group: SequenceGroup) -> WaitingGroups | WaitingQueue:
        """Return the queue in which a group waits, or would wait."""
        return self.swapped if group.status is SequenceStatus.SWAPPED else self.waiting

    @property
    def has_queued(self) -> bool:
        """Whether a group waits for the device, with blocks on the host or without."""
        return len(self.waiting) > 0 or len(self.swapped) > 0

    def oldest_waiting(self) -> SequenceGroup | None:
        """Return the group that waits without blocks and arrived first, or None."""
        return next((group for group in self.groups.values() if group.status is SequenceStatus.WAITING), None)

    def num_prompt_tokens_before(self, group: SequenceGroup, now: float) -> int:
        """Return the prompt tokens that running and waiting groups have left to compute, without those that the policy
        computes after a new group's prompt."""
        total = self.waiting.num_prompt_tokens_between(*self.policy.keys_before(group, now))
        for other in self.on_device:
            if not self.policy.outranks(group, other, now):
                total += max(0, other.num_prompt_tokens - other.live[0].num_computed_tokens)
        return total

    @property
    def on_device(self) -> list[SequenceGroup]:
        """Groups with blocks on the device: the running ones, and those being fetched."""
        return [*self.running, *self.fetching.values()] if self.fetching else self.running

    def sequences_on_device(self) -> Iterator[Sequence]:
        """Yield the live sequences with blocks on the device."""
        for group in self.on_device:
            yield from group.live if group.refork_at is None else group.live[:1]

    # ---- groups come onto the device and leave it ----

    def admit(self, group: SequenceGroup, because: str, now: float) -> None:
        """Move a waiting group, which has blocks now, to the running ones. `because`: why no more of its prompt was
        found in the cache."""
        self.waiting.remove(group)
        self.policy.note_admitted(group)
        cached, stats = group.live[0].num_computed_tokens, self.stats
        stats.num_queried_tokens += len(group.live[0].token_ids)
        stats.num_cached_tokens += cached
        if group.was_preempted:
            stats.num_recomputed_tokens += max(0, group.num_dropped_tokens - cached)
            group.metrics.note(now, "scheduled again")
        else:
            self.num_queued_tokens -= group.num_prompt_tokens
            self._virtual_time.note_admitted(group)
            group.num_cached_tokens, group.cache_miss_reason = cached, because
            group.metrics.first_scheduled_time = now
            group.metrics.note(now, "scheduled")
        self._run(group)

    def count_prompt(self, group: SequenceGroup, num_computed: int) -> None:
        """Count the prompt tokens among the first `num_computed` of the group, cached ones included, each once: those
        that a preemption drops are not counted again."""
        num_counted = min(num_computed, group.num_prompt_tokens)
        if num_counted > group.num_counted_tokens:
            self.stats.num_prompt_tokens += num_counted - group.num_counted_tokens
            group.num_counted_tokens = num_counted

    def swap_in(self, group: SequenceGroup, now: float) -> None:
        """Move a swapped group to the running ones."""
        self.swapped.remove(group)
        group.metrics.note(now, "swapped in")
        self._run(group)

    def suspend(self, group: SequenceGroup, status: SequenceStatus, now: float) -> None:
        """Move a running group to the waiting or the swapped ones; the worker releases its sequences."""
        self._leave_device(group)
        for sequence in group.live:
            self._release(sequence)
        group.status, group.was_preempted, group.refork_at = status, True, None
        self.queue_of(group).push(group)
        is_swapped = status is SequenceStatus.SWAPPED
        now = max(now, group.metrics.timeline[-1][0])  # a result may be newer than the plan of the last step
        group.metrics.num_preemptions += 1
        group.metrics.note(now, "preempted, swapped out" if is_swapped else "preempted, to be recomputed")
        self.stats.num_preemptions += 1
        self.stats.num_preemptions_by_swap += is_swapped

    def forget_released(self) -> None:
        """Assume that the workers hold no sequence: all are sent again."""
        for sequence in self._released:
            sequence.is_resident = False  # ended sequences too: their siblings may still run
        self._released.clear()

    def unswap(self, group: SequenceGroup) -> None:
        """Move a swapped group to the waiting ones."""
        self.swapped.remove(group)
        group.status = SequenceStatus.WAITING
        self.waiting.push(group)

    def begin_fetch(self, group: SequenceGroup, fetch_id: int) -> None:
        """Take a group from the running ones until its fetch has ended."""
        self.running.remove(group)
        self.fetching[fetch_id] = group
        group.status = SequenceStatus.FETCHING

    def end_fetch(self, fetch_id: int, now: float, *, is_complete: bool) -> SequenceGroup | None:
        """Return the group whose fetch has ended, None when it has ended itself. It runs, or waits again."""
        group = self.fetching.pop(fetch_id, None)
        if group is None:
            return None
        self.num_running_sequences -= group.max_running_sequences
        group.metrics.note(now, "fetched" if is_complete else "not fetched, to be computed")
        if is_complete:
            self._run(group)
        else:
            self.num_departures += 1
            group.status, group.was_preempted = SequenceStatus.WAITING, True
            self.waiting.push(group)
        return group

    def _run(self, group: SequenceGroup) -> None:
        group.status = SequenceStatus.RUNNING
        insort(self.running, group, key=lambda other: other.arrival)
        self.num_running_sequences += group.max_running_sequences

    def _leave_device(self, group: SequenceGroup) -> None:
        if group.status is SequenceStatus.RUNNING:
            self.running.remove(group)
        else:
            self.fetching = {fetch_id: each for fetch_id, each in self.fetching.items() if each is not group}
        self.num_running_sequences -= group.max_running_sequences
        self.num_departures += 1

    # ---- sequences ----

    def fork(self, group: SequenceGroup, parent: Sequence, index: int) -> Sequence:
        """Return a new sequence of the group with all that its parent has."""
        child = parent.fork(self._new_seq_id(), index)
        self.block_manager.fork(parent, child)
        self._by_sequence[child.seq_id] = group, child
        group.sequences.append(child)
        group.live.append(child)
        return child

    def end_sequence(self, group: SequenceGroup, sequence: Sequence, status: SequenceStatus) -> None:
        """End a live sequence: its full blocks can still be found by their content, all are free."""
        sequence.status = status
        before = group.max_running_sequences
        group.live.remove(sequence)
        if group.status in _ON_DEVICE:
            self.num_running_sequences -= before - group.max_running_sequences
            if group.refork_at is None and status is not SequenceStatus.FINISHED_ERROR:
                self.publish(group, sequence)
                if group.request.keep_s and group.metrics.last_token_time is not None:
                    digests = self.block_manager.transfer_digests(sequence, group.request.cache_key)
                    self.block_manager.pins.keep(digests, group.metrics.last_token_time + group.request.keep_s)
        self.block_manager.free(sequence)
        self._release(sequence)

    def publish(self, group: SequenceGroup, sequence: Sequence) -> None:
        """Enter what a sequence has computed, or will have in the planned step, into the prefix index; of a prompt that
        is handed over also the last, partly filled block."""
        cache_key = group.request.cache_key
        self.block_manager.publish(sequence, cache_key)
        if group.request.keep_s or group.request.prefill:
            self.block_manager.publish_tail(sequence, cache_key)

    def drop_sequence(self, group: SequenceGroup, sequence: Sequence) -> None:
        """End and forget a sequence of which there is no output: a beam without survivors."""
        self.end_sequence(group, sequence, SequenceStatus.FINISHED_STOPPED)
        group.sequences.remove(sequence)
        del self._by_sequence[sequence.seq_id]

    def _release(self, sequence: Sequence) -> None:
        if sequence.is_resident:
            self._released.append(sequence)

    def _new_seq_id(self) -> int:
        self._num_seq_ids += 1
        return self._num_seq_ids

    # ---- requests end ----

    def end_group(self, group: SequenceGroup, status: SequenceStatus, now: float) -> None:
        """End a group with all its live sequences."""
        for sequence in list(group.live):
            self.end_sequence(group, sequence, status)
        if group.status in _ON_DEVICE:
            self._leave_device(group)
        else:
            if self.held.pop(group.request_id, None) is None:
                self.queue_of(group).remove(group)
            if not group.was_preempted:
                self.num_queued_tokens -= group.num_prompt_tokens
        group.status = status
        group.metrics.end(now, _HOW_ENDED.get(status, "finished"))
        self.timelines.append(_timeline(group))
        del self.groups[group.request_id]
        self.policy.note_end(group)
        if self._connector is not None:
            self._connector.ended(group.request_id)
        for sequence in group.sequences:
            del self._by_sequence[sequence.seq_id]

    def send(self, output: EngineCoreOutput) -> None:
        """Keep the output of something that ended without a step, or was refused, until `take_ended`."""
        self._ended.append(output)

    @property
    def has_ended(self) -> bool:
        """Whether `take_ended` returns an output."""
        return bool(self._ended)

    def take_ended(self) -> list[EngineCoreOutput]:
        """Return the outputs of requests and sequences that ended without a step, each once."""
        ended, self._ended = self._ended, []
        return ended

    # ---- steps ----

    @property
    def next_step_id(self) -> int:
        """The id of the step that is planned next."""
        return self.stats.num_steps + 1

    def begin_step(self, planned: Container[int], num_swapped_out: int, num_swapped_in: int) -> tuple[int, list[int]]:
        """Count a step with rows of the sequences `planned`. Returns its id and the sequences that the worker releases
        with it."""
        self.stats.num_steps += 1
        self.stats.num_swapped_out_blocks += num_swapped_out
        self.stats.num_swapped_in_blocks += num_swapped_in
        released, self._released = self._released, []
        for sequence in released:
            # a preempted sequence may have a row in this very step
            sequence.is_resident = sequence.seq_id in planned
        return self.stats.num_steps, [sequence.seq_id for sequence in released]


def _timeline(group: SequenceGroup) -> RequestTimeline:
    return RequestTimeline(
        request_id=group.request_id,
        tenant=group.request.tenant,
        num_prompt_tokens=group.num_prompt_tokens,
        num_cached_tokens=group.num_cached_tokens,
        num_generated_tokens=sum(sequence.num_output_tokens for sequence in group.sequences),
        num_preemptions=group.metrics.num_preemptions,
        events=group.metrics.timeline,
    )
