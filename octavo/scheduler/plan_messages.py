"""What a plan tells the workers: the messages that make sequences known to them, and rows."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.core.media import MediaInput, views_of
from octavo.core.sequence import Sequence, SequenceGroup
from octavo.core.step import NewSequence, ScheduledSequence
from octavo.kv_cache.allocation import SlotGrowth
from octavo.kv_cache.block_table import BlockTable


def new_sequence(group: SequenceGroup, sequence: Sequence, table: BlockTable, block_size: int) -> NewSequence:
    """Return the message that makes a sequence known to the worker. A sibling that is there already is its parent."""
    parent = next((other for other in group.sequences if other.is_resident), None)
    num_shared = group.num_prompt_tokens if parent is not None else 0
    if sequence.parent is not None and sequence.parent[0].is_resident:
        parent, num_shared = sequence.parent
    sequence.num_sent_tokens = len(sequence.token_ids)
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
    if group.waits_for_results and sequence.num_sent_tokens < len(sequence.token_ids):
        assert end == len(sequence.token_ids), "tokens are sent with the row that computes the last of them"
        sent = tuple(sequence.token_ids[sequence.num_sent_tokens :])
        sequence.num_sent_tokens = len(sequence.token_ids)
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
