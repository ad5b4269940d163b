"""Every accepted request that has not ended: groups, their sequences by id, the three queues, and how they leave."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC
from typing import Final

from octavo.core.messages import EngineCoreOutput, EngineCoreRequest, RequestTimeline, SchedulerStats
from octavo.core.outputs import RequestError
from octavo.core.sequence import Sequence, SequenceGroup, SequenceStatus
from octavo.kv_cache.block_manager import BlockManager
from octavo.scheduler.policy import GroupQueue, Policy
from octavo.scheduler.turns import Turns
from octavo.scheduler.waiting_queue import WaitingQueue

NUM_TIMELINES: Final = 256
"""Ended requests whose timelines are kept."""

_HOW_ENDED: Final = {
    SequenceStatus.FINISHED_ABORTED: "aborted",
    SequenceStatus.FINISHED_ERROR: "failed",
    SequenceStatus.FINISHED_IGNORED: "refused",
}


class Registry:
    """Shared by those who plan, those who preempt and those who take results in.

    waiting: groups without blocks, new ones and preempted ones.
    running: groups with blocks on the device, in order of arrival.
    num_running_sequences: most sequences that those can still run at once.
    swapped: groups whose blocks are on the host.
    timelines: of the requests that ended last.
    num_departures: how often a group has left the running ones.
    num_queued_tokens: prompt tokens of the groups that have never run.
    released: sequences whose state the worker drops with the next step.
    waits_for_results: every group waits for results.
    """

    def __init__(self, block_manager: BlockManager, policy: Policy, *, waits_for_results: bool = False) -> None:
        self.block_manager = block_manager
        self._waits_for_results = waits_for_results
        self.groups: dict[str, SequenceGroup] = {}
        self._policy = policy
        self.waiting = policy.make_queue()
        self.running: list[SequenceGroup] = []
        self.num_running_sequences = 0
        self.num_departures = 0
        self.swapped = WaitingQueue(policy.key)
        self.released: list[Sequence] = []
        self.ended: list[EngineCoreOutput] = []
        self.stats = SchedulerStats(
            num_blocks=block_manager.limits.num_blocks, num_host_blocks=block_manager.limits.num_host_blocks
        )
        self._by_sequence: dict[int, tuple[SequenceGroup, Sequence]] = {}
        self.timelines: deque[RequestTimeline] = deque(maxlen=NUM_TIMELINES)
        self.num_queued_tokens = 0
        self.turns = Turns()
        self._next_seq_id = 0

    # ---- coming in ----

    def new_groups(self, requests: SequenceABC[EngineCoreRequest]) -> list[SequenceGroup]:
        """Return groups for requests that arrive together. They belong to the registry once they are added."""
        made = []
        for request, virtual_start in zip(requests, self.turns.starts(requests), strict=True):
            seq_id = self._new_seq_id()
            made.append(SequenceGroup(request, seq_id, seq_id, virtual_start))
        return made

    def add(self, group: SequenceGroup) -> None:
        """Put a new group into the waiting queue."""
        group.waits_for_results |= self._waits_for_results
        self.groups[group.request_id] = group
        self._by_sequence[group.sequences[0].seq_id] = group, group.sequences[0]
        self.num_queued_tokens += group.num_prompt_tokens
        self.waiting.push(group)

    def fork(self, group: SequenceGroup, parent: Sequence, index: int) -> Sequence:
        """A new sequence of the group with all that its parent has."""
        child = parent.fork(self._new_seq_id(), index)
        self.block_manager.fork(parent, child)
        self._by_sequence[child.seq_id] = group, child
        group.sequences.append(child)
        group.live.append(child)
        return child

    def find(self, seq_id: int) -> tuple[SequenceGroup | None, Sequence | None]:
        """The group and the sequence with this id; None, None when it is gone."""
        return self._by_sequence.get(seq_id, (None, None))

    def group_of(self, seq_id: int) -> SequenceGroup:
        """The group of a sequence that is here."""
        return self._by_sequence[seq_id][0]

    def queue_of(self, group: SequenceGroup) -> GroupQueue:
        """Return the queue in which a group waits, or would wait, for blocks."""
        return self.swapped if group.status is SequenceStatus.SWAPPED else self.waiting

    def start(self, group: SequenceGroup) -> None:
        """Move a group that left a queue to the running ones."""
        self._leave_queue(group)
        if not group.was_preempted:
            self.turns.note_admitted(group)
        self._set_status(group, SequenceStatus.RUNNING)
        insort(self.running, group, key=_arrival)
        self.num_running_sequences += group.max_running_sequences

    # ---- giving way ----

    def suspend(self, group: SequenceGroup, status: SequenceStatus) -> None:
        """Move a running group to the waiting or the swapped ones."""
        self._set_status(group, status)
        self._leave_running(group)
        self.queue_of(group).put_back(group)

    # ---- leaving ----

    def end_sequence(self, group: SequenceGroup, sequence: Sequence, status: SequenceStatus) -> None:
        """A live sequence ends; its full blocks stay findable, its others are free."""
        sequence.status = status
        before = group.max_running_sequences
        group.live.remove(sequence)
        if group.status is SequenceStatus.RUNNING:
            self.num_running_sequences -= before - group.max_running_sequences
        may_publish = group.status is SequenceStatus.RUNNING and group.refork_at is None
        if may_publish and status is not SequenceStatus.FINISHED_ERROR:
            self.block_manager.publish(sequence, group.request.cache_key)
        self.block_manager.free(sequence)
        if sequence.is_resident:
            self.released.append(sequence)

    def drop_sequence(self, group: SequenceGroup, sequence: Sequence) -> None:
        """A beam that was beaten: it ends and is forgotten, for nobody will ask for it."""
        self.end_sequence(group, sequence, SequenceStatus.FINISHED_STOPPED)
        group.sequences.remove(sequence)
        del self._by_sequence[sequence.seq_id]

    def end_group(self, group: SequenceGroup, status: SequenceStatus, now: float) -> None:
        """All live sequences end, and the group leaves."""
        for sequence in list(group.live):
            self.end_sequence(group, sequence, status)
        if group.status is SequenceStatus.RUNNING:
            self._leave_running(group)
        else:
            self.queue_of(group).remove(group)
            self._leave_queue(group)
        self._forget(group, status, now)

    def refuse(self, group: SequenceGroup, because: str, now: float) -> None:
        """End a group that waits and can never run here."""
        self.queue_of(group).remove(group)
        self._leave_queue(group)
        self.ended.append(
            EngineCoreOutput(
                request_id=group.request_id,
                deltas=[],
                finished=True,
                error=RequestError(because, field="prompt", code="request_too_large", is_client_error=True),
                metrics=group.metrics,
            )
        )
        for sequence in list(group.live):
            self.end_sequence(group, sequence, SequenceStatus.FINISHED_IGNORED)
        self._forget(group, SequenceStatus.FINISHED_IGNORED, now)

    def _leave_running(self, group: SequenceGroup) -> None:
        self.running.remove(group)
        self.num_running_sequences -= group.max_running_sequences
        self.num_departures += 1

    def _leave_queue(self, group: SequenceGroup) -> None:
        if group.status is SequenceStatus.WAITING and not group.was_preempted:
            self.num_queued_tokens -= group.num_prompt_tokens

    def _forget(self, group: SequenceGroup, status: SequenceStatus, now: float) -> None:
        group.status = status
        group.metrics.end(now, _HOW_ENDED.get(status, "finished"))
        self.timelines.append(_timeline(group))
        del self.groups[group.request_id]
        self._policy.note_end(group)
        for sequence in group.sequences:
            del self._by_sequence[sequence.seq_id]

    def _set_status(self, group: SequenceGroup, status: SequenceStatus) -> None:
        group.status = status
        for sequence in group.live:
            sequence.status = status

    def _new_seq_id(self) -> int:
        self._next_seq_id += 1
        return self._next_seq_id

    # ---- looking in ----

    def oldest_waiting(self) -> SequenceGroup | None:
        """The group that waits without blocks and arrived first, or None."""
        return next((group for group in self.groups.values() if group.status is SequenceStatus.WAITING), None)

    def num_prompt_tokens_before(self, group: SequenceGroup, now: float) -> int:
        """Return the prompt tokens that running and waiting groups have left to compute, without those that the policy
        computes after a new group's prompt."""
        policy, total = self._policy, 0
        place = policy.place(group, now)
        for other in self.groups.values():
            is_running = other.status is SequenceStatus.RUNNING
            is_after = policy.outranks(group, other, now) if is_running else place < policy.place(other, now)
            if not is_after and other.status is not SequenceStatus.SWAPPED:
                total += max(0, other.num_prompt_tokens - other.live[0].num_computed_tokens)
        return total

    def sequences_on_device(self) -> Iterator[Sequence]:
        """Live sequences with a block table on the device."""
        for group in self.running:
            yield from group.live if group.refork_at is None else group.live[:1]

    def check(self) -> None:
        """Prove that queues, groups and blocks agree. Raises AssertionError."""
        in_swapped = [s for g in self.groups.values() if g.status is SequenceStatus.SWAPPED for s in g.live]
        self.block_manager.check(self.sequences_on_device(), in_swapped)
        assert len(self.running) + len(self.waiting) + len(self.swapped) == len(self.groups)
        assert [g.arrival for g in self.running] == sorted(g.arrival for g in self.running)
        assert self.num_running_sequences == sum(g.max_running_sequences for g in self.running)
        assert {s.seq_id for g in self.groups.values() for s in g.sequences} == set(self._by_sequence)


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


def _arrival(group: SequenceGroup) -> int:
    return group.arrival
