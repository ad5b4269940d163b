"""Rows of a table: copied as they are, whatever their type, and never from outside."""

from __future__ import annotations

import pytest
import torch

from tests.conformance.runtimes import levels_of, ops

UNITS = levels_of("embedding")


@pytest.mark.parametrize("level", UNITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_are_copied(level: str, dtype: torch.dtype) -> None:
    for dim in (1, 33, 3000):
        table = torch.randn(100, dim).to(dtype)
        ids = torch.randint(100, (50,))
        assert torch.equal(ops(level, 2).embedding(ids, table), table[ids])
        assert torch.equal(ops(level).embedding(ids - 3, table, 3), table[ids])
    assert ops(level).embedding(ids[:0], table).shape == (0, 3000)


@pytest.mark.parametrize("level", UNITS)
@pytest.mark.parametrize("wrong", [10, -3])
def test_rows_that_are_not_there_are_refused(level: str, wrong: int) -> None:
    with pytest.raises(IndexError, match=f"row {wrong + 2} of a table with 10 rows"):
        ops(level).embedding(torch.tensor([0, wrong]), torch.zeros(10, 4), 2)
