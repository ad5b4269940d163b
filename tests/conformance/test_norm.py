"""Norms: bits that depend on the row alone, widths that fill no vector, NaN that stays in its row."""

from __future__ import annotations

import pytest
import torch

from octavo.ops import norm as reference
from tests.conformance.runtimes import TYPES, levels_of, ops

UNITS = levels_of("norm")


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("level", UNITS)
def test_rms_norm_of_a_row_has_the_same_bits_in_any_batch_with_any_threads(level: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    for dim in (8, 40, 131, 1024):
        x, residual = (torch.randn(37, dim, generator=generator).to(dtype) for _ in range(2))
        weight = torch.rand(dim, generator=generator).to(dtype)
        whole = [each.clone() for each in ops(level).add_rms_norm(x, residual, weight, 1e-6)]
        for one, other in zip(ops(level, 2).add_rms_norm(x, residual, weight, 1e-6), whole, strict=True):
            assert torch.equal(one, other)
        for start, stop in ((0, 1), (5, 6), (3, 36)):
            piece = ops(level).add_rms_norm(x[start:stop], residual[start:stop], weight, 1e-6)
            assert torch.equal(piece[0], whole[0][start:stop])
            assert torch.equal(piece[1], whole[1][start:stop])


@pytest.mark.parametrize("level", UNITS)
def test_rms_norm_reads_rows_that_lie_apart(level: str) -> None:
    wide = torch.randn(5, 100)
    weight = torch.rand(64)
    found = ops(level).rms_norm(wide[:, :64], weight, 1e-6)
    torch.testing.assert_close(found, reference.rms_norm(wide[:, :64].contiguous(), weight, 1e-6))
    assert torch.equal(found, ops(level).rms_norm(wide[:, :64].contiguous(), weight, 1e-6))


@pytest.mark.parametrize("level", UNITS)
def test_heads_that_lie_apart_are_normalised_too(level: str) -> None:
    qkv, weight = torch.randn(3, 6, 16), torch.rand(16)
    found = ops(level).rms_norm(qkv[:, 2:4], weight, 1e-6)
    assert torch.equal(found, ops(level).rms_norm(qkv[:, 2:4].contiguous(), weight, 1e-6))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("level", UNITS)
def test_layer_norm_of_a_row_has_the_same_bits_in_any_batch_with_any_threads(level: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    for dim in (1, 7, 40, 131, 1024):
        x, residual = (torch.randn(37, dim, generator=generator).add(2.0).to(dtype) for _ in range(2))
        weight, bias = torch.rand(2, dim, generator=generator).to(dtype)
        whole = ops(level).add_layer_norm(x, residual, weight, bias, 1e-5)
        expected = reference.add_layer_norm(x, residual, weight, bias, 1e-5)
        tolerance = 2e-5 if dtype is torch.float32 else 2e-2
        shared = ops(level, 2).add_layer_norm(x, residual, weight, bias, 1e-5)
        for one, other, third in zip(whole, expected, shared, strict=True):
            torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)
            assert torch.equal(one, third)
        for start, stop in ((0, 1), (5, 6), (3, 36)):
            piece = ops(level).add_layer_norm(x[start:stop], residual[start:stop], weight, bias, 1e-5)
            assert torch.equal(piece[0], whole[0][start:stop])
            assert torch.equal(piece[1], whole[1][start:stop])
        assert torch.equal(ops(level).layer_norm(whole[1], weight, bias, 1e-5), whole[0])


@pytest.mark.parametrize("level", UNITS)
def test_a_mean_far_from_zero_costs_no_digits(level: str) -> None:
    x = torch.randn(3, 301, dtype=torch.float64) + 1000
    expected = (x - x.mean(-1, keepdim=True)) / x.var(-1, unbiased=False, keepdim=True).sqrt()
    found = ops(level).layer_norm(x.float(), None, None, 0.0)
    # the numbers themselves have 6e-5 of rounding at 1000
    torch.testing.assert_close(found.double(), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("level", UNITS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_row_with_nan_or_infinity_spoils_no_other(level: str, dtype: torch.dtype, wrong: float) -> None:
    x, weight, bias = torch.randn(9, 43).to(dtype), torch.rand(43).to(dtype), torch.rand(43).to(dtype)
    for norm in (
        lambda: ops(level).rms_norm(x, weight, 1e-6),
        lambda: ops(level).layer_norm(x, weight, bias, 1e-6),
    ):
        x[4, 42] = 1.0
        before = norm().clone()
        x[4, 42] = wrong
        after = norm()
        assert after[4].isnan().any()
        assert torch.equal(after[[0, 1, 2, 3, 5, 6, 7, 8]], before[[0, 1, 2, 3, 5, 6, 7, 8]])
