"""What the step's tensors say."""

from __future__ import annotations

import torch

from octavo.attention.metadata import AttentionMetadata


def test_tokens_are_mapped_through_the_block_table() -> None:
    metadata = AttentionMetadata.build([3, 1], [6, 5], [[7, 2], [4, 9, 1]], block_size=4)
    assert metadata.slot_mapping.tolist() == [7 * 4 + 3, 2 * 4 + 0, 2 * 4 + 1, 9 * 4 + 0]
    assert metadata.query_starts.tolist() == [0, 3, 4]
    assert metadata.sequence_lengths.tolist() == [6, 5]


def test_short_tables_are_padded_with_the_null_block() -> None:
    metadata = AttentionMetadata.build([1, 1], [1, 9], [[5], [4, 9, 1]], block_size=4)
    assert metadata.block_tables.tolist() == [[5, 0, 0], [4, 9, 1]]
    assert metadata.block_tables.dtype == torch.int32


def test_what_layers_share_is_computed_once() -> None:
    metadata = AttentionMetadata.build([1], [1], [[1]], block_size=4)
    made = [metadata.once("mask", object) for _ in range(3)]
    assert made[0] is made[1] is made[2]
    assert metadata.once("other", object) is not made[0]
