"""Packing: no document is cut, none is lost, and a row predicts its own next token."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from training.octavo_tiny.batches import IGNORED, PackedStream, RowShape, pack
from training.octavo_tiny.corpus import make_documents
from training.octavo_tiny.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([document.text for document in make_documents(0, 0, 200)], vocab_size=600)


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12), max_size=30))
def test_packing_keeps_every_document_whole_and_loses_none(documents: list[list[int]]) -> None:
    rows, left = pack(documents, RowShape(rows=3, length=12))
    assert len(rows) == 3
    assert all(len(row) <= 12 for row in rows)
    assert sorted(chain(*rows, *left)) == sorted(chain(*documents))


def test_targets_are_the_inputs_moved_by_one(tokenizer: Tokenizer) -> None:
    stream = PackedStream(tokenizer, 0, RowShape(4, 256), RowShape(1, 1024))
    for long_share in (0.0, 1.0):
        inputs, targets = stream.next_batch(long_share)
        for row, target in zip(inputs, targets, strict=True):
            assert len(row) == len(target) == (1024 if long_share else 256)
            filled = [position for position, token in enumerate(target) if token != IGNORED]
            assert len(filled) > len(row) // 2
            assert all(target[position] == row[position + 1] for position in filled if position + 1 < len(row))


def test_the_stream_moves_on_and_can_be_taken_up_again(tokenizer: Tokenizer) -> None:
    first = PackedStream(tokenizer, 0, RowShape(4, 256), RowShape(1, 1024))
    batch = first.next_batch(0.0)
    later = PackedStream(tokenizer, 0, RowShape(4, 256), RowShape(1, 1024), next_document=first.next_document)
    assert first.next_document > 0
    assert later.next_batch(0.0) != batch
