"""Makes separate attention rows for tokens that see other tokens than those before them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from octavo.attention.metadata import AttentionMetadata, SpanRows
from octavo.worker.batch.packed_arrays import copy_to_device

if TYPE_CHECKING:
    from octavo.worker.batch.input_batch import BatchRow


def span_rows(rows: Sequence[BatchRow], attention: Sequence[AttentionMetadata]) -> SpanRows | None:
    """Return a row for each span with tokens in the rows of a step; None if there is none.

    attention: of the step, for each cache group. A step computes all tokens that are left of a span.
    """
    found: list[tuple[int, int, int, int]] = []  # row, first flat index, tokens, end in the sequence
    first = 0
    for index, row in enumerate(rows):
        start = row.scheduled.start
        for offset, length in row.state.whole_spans:
            begin, end = max(offset, start), offset + length
            if begin < min(end, row.end):
                assert end <= row.end, "a row ends among tokens that attend to each other"
                found.append((index, first + begin - start, end - begin, end))
        first += row.scheduled.num_tokens
    if not found or not attention:
        return None
    device = attention[0].query_starts.device
    places, starts, counts, ends = zip(*found, strict=True)
    arrays: list[NDArray[Any]] = [np.array(each, dtype=np.int32) for each in ([0, *accumulate(counts)], ends)]
    indices = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
    arrays += [np.array(places), np.concatenate(indices)]
    _, (query_starts, lengths, lines, token_indices) = copy_to_device(arrays, device)
    return SpanRows(
        token_indices,
        [
            AttentionMetadata(
                query_starts=query_starts,
                sequence_lengths=lengths,
                block_tables=each.block_tables[lines],
                slot_mapping=each.slot_mapping[:0],
                block_size=each.block_size,
                query_lengths=counts,
                lengths=ends,
            )
            for each in attention
        ],
    )


def rows_without_unseen(rows: Sequence[BatchRow], attention: Sequence[AttentionMetadata]) -> list[AttentionMetadata]:
    """Return the metadata of a step of whole prompts, some of which end with tokens that no other token sees.
    attention: of the step, for each cache group. Each of these tokens is a row of its own, which sees the tokens before
    all of them; for a layer with a window, as if it came right after those.
    """
    counts, ends, places = [], [], []
    for index, row in enumerate(rows):
        hidden = 0 if row.state.pooled is None else row.state.pooled.num_unseen
        assert not hidden or not row.scheduled.start, "prompts with tokens that no token sees are computed whole"
        num_seen = row.end - hidden
        counts += [num_seen, *[1] * hidden]
        ends += [num_seen] * (1 + hidden)
        places += [index] * (1 + hidden)
    arrays: list[NDArray[Any]] = [np.array(each, dtype=np.int32) for each in ([0, *accumulate(counts)], ends)]
    _, (query_starts, lengths, lines) = copy_to_device([*arrays, np.array(places)], attention[0].query_starts.device)
    return [
        AttentionMetadata(
            query_starts=query_starts,
            sequence_lengths=lengths,
            block_tables=each.block_tables[lines],
            slot_mapping=each.slot_mapping,
            block_size=each.block_size,
            query_lengths=counts,
            lengths=ends,
        )
        for each in attention
    ]
