"""Rotary embedding: bits that depend on the token alone, heads of any even size, positions outside the table."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.ops.rotary import rotary as reference
from octavo.ops.rotary import rotary_table
from tests.conformance.runtimes import TYPES, levels_of, ops

UNITS = levels_of("rotary")

TABLES = {dim: rotary_table(10_000.0 ** -(torch.arange(0, dim, 2) / dim), 50) for dim in (2, 8, 20, 64, 80, 128)}


def make(dtype: torch.dtype, dim: int, tokens: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """q of three heads and k of two, slices of one tensor, and positions."""
    generator = torch.Generator().manual_seed(dim)
    q, k, _ = torch.randn(tokens, 7, dim, generator=generator).to(dtype).split([3, 2, 2], dim=1)
    return q, k, torch.randint(50, (tokens,), generator=generator)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("level", UNITS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", TABLES)
def test_a_token_has_the_same_bits_in_any_batch_on_any_number_of_threads(
    rotated: int, interleaved: bool, level: str, dtype: torch.dtype
) -> None:
    table = TABLES[rotated]
    for dim in (rotated, rotated + 6):
        q, k, positions = make(dtype, dim)
        norms = torch.rand(2, dim).add(0.5).to(dtype)
        whole = ops(level).rotary(q, k, positions, table, *norms, (1e-6, 0.0), interleaved)
        expected = reference(q, k, positions, table, *norms, (1e-6, 0.0), interleaved)
        tolerance = 1e-5 if dtype is torch.float32 else 2e-2
        for one, other, shared in zip(
            whole, expected, ops(level, 2).rotary(q, k, positions, table, *norms, (1e-6, 0.0), interleaved), strict=True
        ):
            torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)
            assert torch.equal(one, shared)
        for piece in (slice(0, 1), slice(39, 40), slice(3, 20)):
            alone = ops(level).rotary(q[piece], k[piece], positions[piece], table, *norms, (1e-6, 0.0), interleaved)
            assert torch.equal(alone[0], whole[0][piece])
            assert torch.equal(alone[1], whole[1][piece])


@pytest.mark.parametrize("level", UNITS)
def test_what_is_turned_stays_as_it_was(level: str) -> None:
    q, k, positions = make(torch.float32, 64)
    before = q.clone(), k.clone()
    ops(level).rotary(q, k, positions, TABLES[64])
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])


@pytest.mark.parametrize("level", UNITS)
def test_nan_stays_with_its_head(level: str) -> None:
    q, k, positions = make(torch.float32, 64, tokens=6)
    expected = [each.clone() for each in ops(level).rotary(q, k, positions, TABLES[64])]
    q[1, 2, 5] = float("nan")
    found = ops(level).rotary(q, k, positions, TABLES[64])
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one[[0, 2, 3, 4, 5]], other[[0, 2, 3, 4, 5]])
    assert found[0][1, 2].isnan().any()
    assert not found[0][1, :2].isnan().any()
    assert torch.equal(found[1][1], expected[1][1])


@pytest.mark.parametrize("level", UNITS)
@pytest.mark.parametrize("position", [50, -1])
def test_a_position_outside_the_table_is_refused(level: str, position: int) -> None:
    q, k, positions = make(torch.float32, 64, tokens=6)
    positions[3] = position
    with pytest.raises(IndexError, match=f"position {position} of a table with 50 rows"):
        ops(level).rotary(q, k, positions, TABLES[64])


@pytest.mark.parametrize("level", UNITS)
def test_a_row_of_the_table_has_the_same_bits_in_tables_of_any_size(level: str) -> None:
    frequencies = 10_000.0 ** -(torch.arange(13) / 13)
    whole = ops(level).rotary_table(frequencies, 5000, 1.5)
    assert torch.equal(whole, ops(level, 2).rotary_table(frequencies, 5000, 1.5))
    assert torch.equal(whole[:70], ops(level).rotary_table(frequencies, 70, 1.5))
    for pair in (0, 12):
        alone = ops(level).rotary_table(frequencies[pair : pair + 1], 5000, 1.5)
        assert torch.equal(alone, whole[:, [pair, 13 + pair]])


@pytest.mark.parametrize("level", UNITS)
def test_the_table_is_exact_at_a_million_positions(level: str) -> None:
    frequencies = torch.tensor([1.0, 0.7, 1e-3, 1e-7])
    angle = torch.outer(torch.arange(1_000_000, dtype=torch.float32), frequencies).double()
    difference = ops(level).rotary_table(frequencies, 1_000_000).double() - torch.cat((angle.cos(), angle.sin()), dim=1)
    assert difference.abs().max() < 1.2e-7
