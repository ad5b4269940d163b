"""Tokens that attend to each other become rows of their own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo.attention.metadata import AttentionMetadata
from octavo.worker.batch.span_rows import span_rows


def row(start: int, num_tokens: int, *spans: tuple[int, int]) -> Any:
    scheduled = SimpleNamespace(start=start, num_tokens=num_tokens)
    return SimpleNamespace(scheduled=scheduled, state=SimpleNamespace(whole_spans=spans), end=start + num_tokens)


def metadata(query_lengths: list[int], lengths: list[int]) -> AttentionMetadata:
    tables = [[10 * index + 1, 10 * index + 2] for index in range(len(lengths))]
    return AttentionMetadata.build(query_lengths, lengths, tables, 16)


def test_each_span_of_a_step_is_a_row_that_ends_with_it() -> None:
    rows = [row(0, 9), row(0, 20, (2, 4), (8, 3), (25, 3)), row(4, 8, (3, 5))]
    found = span_rows(rows, [metadata([9, 20, 8], [9, 20, 12])])
    assert found is not None
    assert found.token_indices.tolist() == [11, 12, 13, 14, 17, 18, 19, 29, 30, 31, 32]
    (spans,) = found.attention
    assert spans.query_starts.tolist() == [0, 4, 7, 11]
    assert list(spans.query_lengths) == [4, 3, 4]  # of the last one an earlier step computed a token
    assert list(spans.lengths) == spans.sequence_lengths.tolist() == [6, 11, 8]
    assert spans.block_tables.tolist() == [[11, 12], [11, 12], [21, 22]]
    assert torch.equal(spans.slot_mapping, torch.empty(0, dtype=torch.int64))


def test_steps_behind_all_spans_have_no_such_rows() -> None:
    assert span_rows([row(6, 1, (2, 4))], [metadata([1], [7])]) is None


def test_a_row_that_ends_within_a_span_is_a_fault_of_the_scheduler() -> None:
    with pytest.raises(AssertionError, match="a row ends among tokens"):
        span_rows([row(0, 4, (2, 4))], [metadata([4], [4])])
