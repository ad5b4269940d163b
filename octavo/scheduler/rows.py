"""Rows for groups that have blocks: prompts, chunks of prompts, and next tokens are computed by the same code."""

from __future__ import annotations

from bisect import bisect_right

from octavo.core.sequence import Sequence, SequenceGroup
from octavo.core.step import ScheduledSequence
from octavo.scheduler.drafts import Proposer
from octavo.scheduler.plan import StepPlan, new_sequence, scheduled_row
from octavo.scheduler.preemption import Preemption
from octavo.scheduler.registry import Registry


class RowPlanner:
    """Plans rows and makes their tokens writable; when no block is free, groups are preempted."""

    def __init__(
        self,
        registry: Registry,
        preemption: Preemption,
        proposer: Proposer | None,
        num_microbatches: int,
        *,
        sends_tokens: bool,
    ) -> None:
        """num_microbatches: steps in flight that share the sequences that decode, where each waits for its token.
        sends_tokens: whether rows carry the drawn tokens, for workers that do not draw."""
        self._registry = registry
        self._block_manager = registry.block_manager
        self._block_size = registry.block_manager.block_size
        self._preemption = preemption
        self._tables = registry.block_manager.tables
        self._proposer = proposer
        self.num_microbatches = num_microbatches
        self._sends_tokens = sends_tokens

    def plan_running(self, plan: StepPlan) -> list[SequenceGroup]:
        """Plan rows for all running groups, in order of arrival, as far as the tokens go; returns those that could use
        more tokens than they were granted."""
        running, tokens = self._registry.running, plan.tokens
        if self.num_microbatches > 1:
            plan.num_decodes_left = self._num_decodes_per_step()
        if self._proposer is not None:
            self._begin_guesses(self._proposer, plan)
        unfinished: list[SequenceGroup] = []
        index = 0
        while index < len(running) and tokens.remaining > 0:
            group, num_running = running[index], len(running)
            self.plan_group(group, plan)
            if tokens.has_declined:
                tokens.has_declined = False
                unfinished.append(group)
            if len(running) == num_running:
                index += 1
            else:  # groups were preempted, before it in the list or behind, perhaps itself
                index = bisect_right(running, group.arrival, key=lambda other: other.arrival)
        return unfinished

    def _begin_guesses(self, proposer: Proposer, plan: StepPlan) -> None:
        """Note whether rows of this step may verify guesses, and how many may bring back new ones."""
        if proposer.take_rest():
            plan.is_resting = True
            return
        num_decoding = self._registry.num_running_sequences
        plan.proposals = proposer.proposals(num_decoding)
        plan.may_draft = proposer.begin_step(num_decoding) and not any(
            group.is_computing_prompt for group in self._registry.running
        )

    def _plan_next_token(
        self, group: SequenceGroup, sequence: Sequence, plan: StepPlan, sent: tuple[int, ...] = ()
    ) -> bool:
        """Plan the most frequent row: one more token of a sequence that the worker knows, drawn like the last, into a
        block that it has. Returns False, with nothing changed, when the row needs more than that.

        It does what `_plan_sequence` does, but faster: a step may have a thousand such rows.
        """
        start, pending = sequence.num_computed_tokens, sequence.num_pending
        num_tokens = len(sequence.token_ids) + pending
        num_output_tokens = num_tokens - sequence.num_prompt_tokens
        if start + 1 != num_tokens or not sequence.is_resident or not 0 < num_output_tokens < group.max_tokens:
            return False
        seq_id = sequence.seq_id
        table = self._tables[seq_id]
        if start >= table.writable_end:
            return False
        plan.rows[seq_id] = ScheduledSequence(seq_id, sequence.epoch, start, 1, 1, (), 0, 0, sent)
        sequence.num_computed_tokens = num_tokens
        sequence.num_pending = pending + 1
        if num_tokens >= (table.num_published + 1) * self._block_size:
            self._note_to_publish(group, sequence, plan)
        return True

    def _plan_sent_token(self, group: SequenceGroup, sequence: Sequence, plan: StepPlan) -> bool:
        """Plan the next token of a sequence whose last one is known, and not sent yet, like `_plan_next_token`.

        Returns False, with nothing changed, where more is to be sent, or drafts or candidates are wanted.
        """
        known = sequence.token_ids
        is_usual = sequence.num_sent_tokens + 1 == len(known) and group.beams is None
        sent = (known[-1],) if self._sends_tokens else ()
        if not is_usual or not self._plan_next_token(group, sequence, plan, sent):
            return False
        sequence.num_sent_tokens = len(known)
        return True

    def plan_group(self, group: SequenceGroup, plan: StepPlan) -> None:
        """Plan rows for the group's sequences. When no block is free, groups are preempted, at last this one."""
        if not group.is_forked and group.live[0].num_pending:
            return  # its first tokens are on their way: it forks when they arrive
        if group.refork_at is not None:
            if group.live[0].num_computed_tokens < group.refork_at:
                self._plan_sequence(group, group.live[0], group.refork_at, plan)
                return
            self._refork(group)
        waits, tokens = group.waits_for_results, plan.tokens
        plan_usual = self._plan_sent_token if waits else self._plan_next_token
        for sequence in group.live:
            if sequence.seq_id in plan.rows:
                continue  # a sibling needs more tokens, and is planned again
            if waits and not self._take_row(sequence, plan):
                continue
            drafts = self._drafts(group, sequence, plan) if waits and plan.may_draft else ()
            has_guesses = waits and (drafts or plan.proposals.num_rows)
            if not has_guesses and tokens.remaining > 0 and plan_usual(group, sequence, plan):
                tokens.remaining -= 1
                continue
            if not self._plan_sequence(group, sequence, len(sequence.token_ids) + sequence.num_pending, plan, drafts):
                return

    def _take_row(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Return whether a sequence that waits for results may have a row in this step, and count it among those that
        have one."""
        if sequence.num_pending or sequence.candidates is not None:
            return False  # its results are on their way, or those of the beams that grow together with it
        if self.num_microbatches > 1 and _is_decoding(sequence):
            plan.num_decodes_left -= 1
            return plan.num_decodes_left >= 0  # otherwise the next step has its row
        return True

    def _plan_sequence(
        self, group: SequenceGroup, sequence: Sequence, target: int, plan: StepPlan, drafts: tuple[int, ...] = ()
    ) -> bool:
        """Plan a row towards `target` computed tokens, and drafts behind them. Returns False when the group itself was
        preempted."""
        pending = sequence.num_pending
        if pending and sequence.num_output_tokens + pending >= group.max_tokens:
            return True  # its last token is on its way
        start = sequence.num_computed_tokens
        want, num_repeated = target - start, sequence.num_repeated
        if num_repeated and want != num_repeated + 1:
            num_repeated = 0  # it starts anew
        num_tokens = plan.grant(group, start, want - num_repeated)
        if num_tokens <= 0 or num_repeated >= plan.tokens.remaining:
            return True
        end = start + num_repeated + num_tokens
        if group.is_drafted is None and self._proposer is not None:
            group.is_drafted = self._proposer.drafts_prompt(start)
        has_room = end == target and plan.proposals.num_rows
        num_proposals = self._num_proposals(group, sequence, plan, len(drafts)) if has_room else 0
        append_slots = self._block_manager.append_slots
        # a block of guesses begins with the last known token, which may stand behind all drafts
        growth = append_slots(sequence, start, end, len(drafts) + num_proposals + (num_proposals > 0))
        while growth is None:
            if drafts or num_proposals:
                drafts, num_proposals = (), 0  # guesses are not worth another group's blocks
            elif not self._make_room(group, plan):
                return False
            growth = append_slots(sequence, start, end, len(drafts))
        if num_proposals:
            group.is_drafted = True
            plan.proposals = plan.proposals._replace(num_rows=plan.proposals.num_rows - 1)
        plan.take(group, start, num_tokens, want - num_repeated)
        plan.tokens.remaining -= len(drafts) + num_repeated
        seq_id, is_new = sequence.seq_id, not sequence.is_resident
        if num_repeated:
            plan.repeats[seq_id], sequence.num_repeated = num_repeated, 0
        if is_new:
            plan.new[seq_id] = new_sequence(group, sequence, self._tables[seq_id], self._block_size)
        copies = plan.prefix_copies.pop(seq_id, []) + growth.copies
        if copies:
            plan.copies[seq_id] = copies
        row = plan.rows[seq_id] = scheduled_row(
            group, sequence, end - start, growth, drafts, num_proposals, is_new=is_new
        )
        if is_new or group.waits_for_results:
            sequence.num_sent_tokens = len(sequence.token_ids)
        sequence.is_resident = True
        sequence.num_computed_tokens = end  # drafts count once they have turned out to be right
        if group.num_counted_tokens < group.num_prompt_tokens:
            self._registry.count_prompt(group, end)
        self._note_to_publish(group, sequence, plan)
        if row.num_samples or row.num_candidates:
            sequence.num_pending = pending + 1
        return True

    def _drafts(self, group: SequenceGroup, sequence: Sequence, plan: StepPlan) -> tuple[int, ...]:
        """Return guesses that the next row of the sequence verifies.

        One of the step's remaining tokens is reserved for each sequence that may still get a row.
        """
        assert self._proposer is not None
        if not group.is_forked or group.beams is not None or not _is_decoding(sequence):
            return ()
        num_others = max(0, self._registry.num_running_sequences - len(plan.rows) - 1)
        num_spare = plan.tokens.remaining - 1 - sequence.num_repeated - num_others
        max_drafts = min(num_spare, group.max_tokens - sequence.num_output_tokens - 1)
        return tuple(self._proposer.propose(group, sequence, max_drafts)[:max_drafts]) if max_drafts > 0 else ()

    def _num_proposals(self, group: SequenceGroup, sequence: Sequence, plan: StepPlan, num_drafts: int) -> int:
        """Return how many guesses a row that draws one token behind `num_drafts` drafts brings back for later rows."""
        is_drafted = group.is_drafted or plan.proposals.catches_up
        if not is_drafted or not group.is_forked or group.beams is not None or sequence.num_pending:
            return 0
        # this row gives at least one token, and a later one draws at least one behind the guesses
        num_left = group.max_tokens - sequence.num_output_tokens - num_drafts - 2
        return max(0, min(plan.proposals.num_tokens, num_left))

    def _num_decodes_per_step(self) -> int:
        """Return how many of the sequences that decode have a row in this step, so that all steps in flight have about
        as many: what one leaves out, the next one computes."""
        num_decoding = sum(len(group.live) for group in self._registry.running if not group.is_computing_prompt)
        return max(1, -(-num_decoding // self.num_microbatches))

    def _note_to_publish(self, group: SequenceGroup, sequence: Sequence, plan: StepPlan) -> None:
        """Note whether the sequence's newest row fills a block that is not in the prefix index yet, may end a prompt
        that is kept, or writes an encoder's output."""
        table = self._tables[sequence.seq_id]
        is_full = sequence.num_computed_tokens >= (table.num_published + 1) * self._block_size
        is_kept = (is_full or group.request.keep_s) and self._block_manager.enable_prefix_caching
        if is_kept or table.lacks_encoding:
            plan.to_publish[sequence.seq_id] = group, sequence

    def _make_room(self, group: SequenceGroup, plan: StepPlan) -> bool:
        """Free blocks for the group: preempt a running one, or, when no other runs, end all pins. Returns False when
        the group itself was preempted."""
        running = self._registry.running
        if len(running) == 1 and self._preemption.clear_pins(group):
            return True
        victim = self._registry.policy.victim(running)
        self._preemption.preempt(victim, plan, because=f"{group.request_id} needs a block and none is free")
        return victim is not group

    def _refork(self, group: SequenceGroup) -> None:
        """Fork the siblings of the first live sequence from it, which has computed their common prefix again."""
        leader = group.live[0]
        for sibling in group.live[1:]:
            self._block_manager.fork(leader, sibling)
            sibling.num_computed_tokens = leader.num_computed_tokens
        group.refork_at = None


def _is_decoding(sequence: Sequence) -> bool:
    """Return whether the worker has all but the last token, which was drawn, of the sequence or of its parent."""
    is_next = sequence.num_computed_tokens + sequence.num_repeated + 1 == len(sequence.token_ids)
    return is_next and (sequence.is_resident or sequence.parent is not None) and sequence.num_output_tokens > 0
