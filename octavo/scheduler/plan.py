"""One step while it is being planned: rows that can be dropped again, and the `SchedulerOutput` they become, with the
messages that make sequences known to the workers."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import NamedTuple

from octavo.config.schema import SchedulerConfig
from octavo.core.media import MediaInput, views_of
from octavo.core.sequence import Sequence, SequenceGroup
from octavo.core.step import NO_PROPOSALS, BlockCopy, BlockOps, NewSequence, ScheduledSequence, SchedulerOutput
from octavo.kv_cache.allocation import SlotGrowth
from octavo.kv_cache.block_manager import BlockManager
from octavo.kv_cache.block_table import BlockTable
from octavo.scheduler.budget import AdapterBudget, Budget, TokenBudget, make_budgets
from octavo.scheduler.registry import Registry


class PlannedRow(NamedTuple):
    """A row, the message that makes its sequence known, and the copies before it."""

    row: ScheduledSequence
    message: NewSequence | None
    copies: list[BlockCopy]


class StepPlan:
    """What belongs to the step, by sequence id and in batch order, and the budgets that it uses up.

    budgets: all of them, `tokens` first. row_budgets: those that limit rows.
    rows: what is computed.
    new: messages that make sequences known to the worker.
    copies: of blocks, before the row of the sequence.
    to_publish: sequences whose row writes what others may take from now on: a block that the prefix index does not
    know, or an encoder's output.
    prefix_copies: copies of sequences that were admitted and have no row yet.
    num_prompt_tokens: tokens in rows that compute more than one.
    num_allowed_prompt_tokens: the most that could have been in those rows beside rows that decode; 0 where none does.
    num_decodes_left: sequences that decode and that may still have a row, where microbatches share them.
    connector: what KV transfers send to the ranks.
    may_draft: whether rows may carry guesses.
    proposals: what rows are to bring back from a draft model in the worker; its rows count down.
    repeats: tokens of rows that were right drafts of the rows before (`Sequence.num_repeated`).
    is_resting: the proposer is not asked for this step.
    adapter_waits: a group lacks a slot for its adapter, and later groups with adapters do not pass it.
    """

    def __init__(self, tokens: TokenBudget, *others: Budget) -> None:
        self.tokens = tokens
        self.budgets: tuple[Budget, ...] = (tokens, *others)
        self.row_budgets = [budget for budget in self.budgets if budget.limits_rows]
        self.rows: dict[int, ScheduledSequence] = {}
        self.new: dict[int, NewSequence] = {}
        self.copies: dict[int, list[BlockCopy]] = {}
        self.to_publish: dict[int, tuple[SequenceGroup, Sequence]] = {}
        self.swap_outs: list[BlockCopy] = []
        self.swap_ins: list[BlockCopy] = []
        self.prefix_copies: dict[int, list[BlockCopy]] = {}
        self.has_preempted = False
        self.connector: bytes | None = None
        self.adapter_waits = False
        self.num_prompt_tokens = self.num_allowed_prompt_tokens = 0
        self.num_decodes_left = sys.maxsize
        self.may_draft = False
        self.proposals = NO_PROPOSALS
        self.repeats: dict[int, int] = {}
        self.is_resting = False

    # ---- budgets ----

    @property
    def is_full(self) -> bool:
        """Whether no group can be admitted, however little it needs."""
        return any(budget.is_full for budget in self.budgets)

    @property
    def has_free_slots(self) -> bool:
        """Whether a further adapter may run."""
        return all(budget.has_free_slots for budget in self.budgets if isinstance(budget, AdapterBudget))

    def lacking(self, group: SequenceGroup) -> Budget | None:
        """Return the first budget that does not grant the group; None when all do."""
        return next((budget for budget in self.budgets if budget.num_missing(group)), None)

    def num_missing(self, group: SequenceGroup) -> tuple[int, ...]:
        """Return how much of each budget would have to be free beyond what is, for the group to be admitted."""
        return tuple(budget.num_missing(group) for budget in self.budgets)

    def admit(self, group: SequenceGroup) -> None:
        """Count what the group holds while it runs."""
        for budget in self.budgets:
            budget.admit(group)

    def release(self, group: SequenceGroup) -> None:
        """Give back what the group held; its rows are dropped one by one."""
        for budget in self.budgets:
            budget.release(group)

    def grant(self, group: SequenceGroup, start: int, want: int) -> int:
        """Return how many of tokens [start, start + want) of a sequence all budgets grant."""
        for budget in self.row_budgets:
            want = budget.grant(group, start, want)
        return want

    def take(self, group: SequenceGroup, start: int, num_tokens: int, want: int) -> None:
        """Count a row of `num_tokens` granted tokens, of `want` that the sequence could use."""
        for budget in self.row_budgets:
            budget.take(group, start, num_tokens, want)
        if num_tokens > 1:
            self.num_prompt_tokens += num_tokens

    # ---- rows ----

    @property
    def has_work(self) -> bool:
        """Whether the workers compute or move anything, beside what KV transfers send them."""
        return bool(self.rows or self.swap_outs or self.swap_ins)

    def drop(self, group: SequenceGroup, sequence: Sequence) -> PlannedRow | None:
        """Remove a sequence's row with its message and copies, and refund it. Returns what was removed."""
        row = self.rows.pop(sequence.seq_id, None)
        if row is None:
            return None
        num_beside = len(row.drafts) + self.repeats.pop(sequence.seq_id, 0)
        num_known = row.num_tokens - num_beside
        for budget in self.row_budgets:
            budget.refund(group, row.start, num_known, want=len(sequence.token_ids) - row.start)
        self.tokens.remaining += num_beside
        if num_known > 1:
            self.num_prompt_tokens -= num_known
        self.to_publish.pop(sequence.seq_id, None)
        return PlannedRow(row, self.new.pop(sequence.seq_id, None), self.copies.pop(sequence.seq_id, []))

    def digests_computed(self, block_manager: BlockManager) -> set[bytes]:
        """Return the digests of the blocks that this step's prefills fill. Decode rows seldom fill one: they are left
        out."""
        digests: set[bytes] = set()
        for seq_id, (_, sequence) in self.to_publish.items():
            if self.rows[seq_id].num_tokens > 1:
                digests.update(self.digests_computed_by(sequence, block_manager))
        return digests

    def digests_computed_by(self, sequence: Sequence, block_manager: BlockManager) -> list[bytes]:
        """Return the digests of the blocks that this sequence's row fills; none when prefix caching is off."""
        row, size = self.rows[sequence.seq_id], block_manager.block_size
        return block_manager.digests(sequence)[row.start // size : (row.start + row.num_tokens) // size]

    def output(self, step_id: int, finished_ids: list[int]) -> SchedulerOutput:
        assert not self.prefix_copies, "a sequence was admitted without a row: what it copies would be lost"
        return SchedulerOutput(
            step_id=step_id,
            new_sequences=list(self.new.values()),
            rows=list(self.rows.values()),
            finished_ids=finished_ids,
            block_ops=BlockOps(
                swap_outs=self.swap_outs,
                swap_ins=self.swap_ins,
                copies=[copy for copies in self.copies.values() for copy in copies],
            ),
            connector=self.connector,
        )


def begin_plan(config: SchedulerConfig, registry: Registry) -> StepPlan:
    """Return an empty plan with the budgets of a step."""
    tokens, *budgets = make_budgets(
        config, registry.on_device, registry.num_running_sequences, has_media=registry.has_media
    )
    assert isinstance(tokens, TokenBudget)
    return StepPlan(tokens, *budgets)


# ---- messages to the workers ----


def new_sequence(group: SequenceGroup, sequence: Sequence, table: BlockTable, block_size: int) -> NewSequence:
    """Return the message that makes a sequence known to the worker. A sibling that is there already is its parent."""
    parent = next((other for other in group.sequences if other.is_resident), None)
    num_shared = group.num_prompt_tokens if parent is not None else 0
    if sequence.parent is not None and sequence.parent[0].is_resident:
        parent, num_shared = sequence.parent
    media = group.request.media
    return NewSequence(
        seq_id=sequence.seq_id,
        index=sequence.index,
        epoch=sequence.epoch,
        token_ids=sequence.token_ids[num_shared:],
        num_prompt_tokens=sequence.num_prompt_tokens,
        block_tables=[list(blocks) for blocks in table.blocks],
        params=group.request.params,
        end_token_ids=tuple(group.end_token_ids),
        bad_words_token_ids=group.request.bad_words_token_ids,
        adapter=group.adapter,
        media=_media(group, sequence, table) if media else (),
        grids=_grids(media) if media else (),
        are_grids_apart=any(each.is_apart for each in media),
        whole_spans=tuple([span for each in media if each.is_whole for span in each.spans]) if media else (),
        views=views_of(media, block_size) if media else (),
        pooled=group.request.pooled,
        parent_id=parent.seq_id if parent is not None else None,
        num_shared_tokens=num_shared,
        is_drafted=bool(group.is_drafted),
    )


def _grids(media: Iterable[MediaInput]) -> tuple[tuple[int, ...], ...]:
    """Return offset, rows, columns and times of the spans by which tokens turn."""
    with_grids = [(each, each.grid) for each in media if each.grid is not None]
    return tuple([(offset, *grid, *each.times) for each, grid in with_grids for offset, _ in each.spans])


def _media(group: SequenceGroup, sequence: Sequence, table: BlockTable) -> tuple[MediaInput, ...]:
    """Return what the worker has to encode for the rows of a sequence from here on."""
    media = group.request.media
    if table.lacks_encoding:
        return media
    return tuple(each for each in media if each.end > sequence.num_computed_tokens and each.kind != "prompt")


def _num_prompt_logprobs(group: SequenceGroup, sequence: Sequence, start: int, end: int) -> int:
    """Return for how many positions of a row over tokens [start, end), from its first, the log-probability of the next
    token has not been sent yet."""
    if group.request.params.prompt_logprobs is None or sequence.index != 0:
        return 0
    last = min(end, group.num_prompt_tokens - 1)
    return last - start if last + 1 > group.num_prompt_logprobs_sent else 0


def scheduled_row(
    group: SequenceGroup,
    sequence: Sequence,
    num_tokens: int,
    growth: SlotGrowth,
    drafts: tuple[int, ...],
    num_proposals: int,
    *,
    is_new: bool,
) -> ScheduledSequence:
    """Return the row that computes the next `num_tokens` known tokens of a sequence and the drafts behind them.

    It draws when it reaches the last known token, and brings back `num_proposals` guesses.
    """
    start = sequence.num_computed_tokens
    end = start + num_tokens
    num_samples = num_candidates = 0
    sent: tuple[int, ...] = ()
    if end == len(sequence.token_ids) + sequence.num_pending:
        if group.beams is not None:
            num_candidates = group.beams.num_listed
        else:
            num_samples = 1 if group.is_forked else group.width
    if not is_new and group.waits_for_results and sequence.num_sent_tokens < len(sequence.token_ids):
        assert end == len(sequence.token_ids), "tokens are sent with the row that computes the last of them"
        sent = tuple(sequence.token_ids[sequence.num_sent_tokens :])
    return ScheduledSequence(
        seq_id=sequence.seq_id,
        epoch=sequence.epoch,
        start=start,
        num_tokens=num_tokens + len(drafts),
        num_samples=num_samples,
        table_changes=() if is_new else tuple(growth.changes),
        num_prompt_logprobs=_num_prompt_logprobs(group, sequence, start, end) if start < group.num_prompt_tokens else 0,
        num_candidates=num_candidates,
        token_ids=sent,
        drafts=drafts,
        num_proposals=num_proposals,
    )
