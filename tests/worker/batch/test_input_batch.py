from __future__ import annotations

import pytest
import torch

from octavo.attention.metadata import AttentionMetadata
from octavo.devices.token_store import HostTokenStore
from octavo.worker.batch.input_batch import BatchRow, InputBatchBuilder
from octavo.worker.batch.sequence_state import Sequences
from tests.worker.prefix_model import KEYS_AND_VALUES, new_sequence, row

TABLES = {1: [3, 1, 4], 2: [7], 3: [5, 9, 2, 6]}


def make_builder() -> tuple[InputBatchBuilder, Sequences]:
    sequences = Sequences(HostTokenStore())
    for seq_id, table in TABLES.items():
        sequences.add(new_sequence(seq_id, [100 * seq_id + i for i in range(4 * len(table))], table))
    return InputBatchBuilder(
        [], sequences, KEYS_AND_VALUES, block_size=4, max_num_tokens=24, device=torch.device("cpu")
    ), sequences


@pytest.mark.parametrize(
    "rows",
    [
        [(1, 0, 12)],
        [(1, 11, 1), (2, 0, 1), (3, 7, 1)],
        [(3, 2, 9), (1, 5, 1), (2, 0, 4)],
        [(2, 1, 2), (3, 12, 4)],
    ],
)
def test_tensors_are_those_of_the_plain_rows(rows: list[tuple[int, int, int]]) -> None:
    builder, sequences = make_builder()
    batch = builder.build([BatchRow(row(*each), sequences[each[0]]) for each in rows])
    expected = AttentionMetadata.build(
        [count for _, _, count in rows],
        [start + count for _, start, count in rows],
        [TABLES[seq_id] for seq_id, _, _ in rows],
        4,
    )
    (found,) = batch.attention
    for name in ("query_starts", "sequence_lengths", "slot_mapping"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
        assert getattr(found, name).dtype == getattr(expected, name).dtype
    width = expected.block_tables.shape[1]
    assert torch.equal(found.block_tables[:, :width], expected.block_tables)
    assert not found.block_tables[:, width:].any()
    assert (list(found.query_lengths), list(found.lengths)) == (expected.query_lengths, expected.lengths)
    positions = [position for _, start, count in rows for position in range(start, start + count)]
    assert batch.positions.tolist() == positions
    owners = [seq_id for seq_id, _, count in rows for _ in range(count)]
    assert batch.token_ids.tolist() == [100 * owner + p for owner, p in zip(owners, positions, strict=True)]


def test_steps_with_as_many_rows_have_the_same_addresses_until_a_table_is_larger_than_before() -> None:
    builder, sequences = make_builder()

    def addresses(*rows: tuple[int, int, int]) -> list[int]:
        batch = builder.build([BatchRow(row(*each), sequences[each[0]]) for each in rows])
        (attention,) = batch.attention
        tensors = (batch.token_ids, batch.positions, attention.query_starts, attention.sequence_lengths)
        tensors += (attention.slot_mapping, attention.block_tables)
        return [each.data_ptr() for each in tensors]

    before = addresses((1, 11, 1), (2, 0, 1))
    addresses((1, 0, 12), (3, 0, 4))
    assert addresses((3, 15, 1), (1, 5, 1)) == before
    sequences.tables[0].write(sequences[2].line, 1, list(range(20, 60)))
    assert addresses((3, 15, 1), (2, 5, 1))[:-1] == before[:-1]
    batch = builder.build([BatchRow(row(2, 1, 1), sequences[2])])
    assert batch.attention[0].block_tables[0, :41].tolist() == [7, *range(20, 60)]


def test_copies_of_the_first_row_read_and_write_block_0_alone() -> None:
    builder, sequences = make_builder()
    rows = [BatchRow(row(*each), sequences[each[0]]) for each in ((1, 11, 1), (3, 7, 1))]
    plain, filled = builder.build(rows).attention[0], builder.build(rows, num_padding_rows=2).attention[0]
    assert filled.lengths == [12, 8, 12, 12]
    assert filled.slot_mapping.tolist() == [*plain.slot_mapping.tolist(), 0, 0]
    assert torch.equal(filled.block_tables[:2], plain.block_tables)
    assert plain.block_tables.all(dim=0)[0]
    assert not filled.block_tables[2:].any()


def test_a_step_beyond_the_token_budget_is_a_broken_promise() -> None:
    builder, sequences = make_builder()
    with pytest.raises(AssertionError, match="max_num_batched_tokens"):
        builder.build([BatchRow(row(1, 0, 12), sequences[1]), BatchRow(row(3, 0, 16), sequences[3])])


def test_a_step_names_the_adapter_of_each_token_where_a_row_uses_one() -> None:
    builder, sequences = make_builder()
    rows = [BatchRow(row(1, 0, 3), sequences[1]), BatchRow(row(2, 0, 2), sequences[2])]
    assert builder.build(rows).adapter_of_token is None
    sequences.add(new_sequence(4, [8] * 4, [9], adapter=5))
    assert builder.build(rows).adapter_of_token is None
    rows.insert(1, BatchRow(row(4, 1, 2), sequences[4]))
    found = builder.build(rows).adapter_of_token
    assert found is not None
    assert (found.dtype, found.tolist()) == (torch.int32, [0, 0, 0, 5, 5, 0, 0])
    sequences.drop(4)
    assert sequences.num_adapted == 0
