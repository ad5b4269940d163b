"""Norms: bits that depend on the row alone, widths that fill no vector."""

from __future__ import annotations

import pytest
import torch

from octavo.ops import rms_norm as reference
from tests.conformance.runtimes import LEVELS, TYPES, ops


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_rms_norm_of_a_row_has_the_same_bits_in_any_batch_on_any_number_of_threads(
    level: str, dtype: torch.dtype
) -> None:
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


@pytest.mark.parametrize("level", LEVELS)
def test_rms_norm_reads_rows_that_lie_apart(level: str) -> None:
    wide = torch.randn(5, 100)
    weight = torch.rand(64)
    found = ops(level).rms_norm(wide[:, :64], weight, 1e-6)
    torch.testing.assert_close(found, reference.rms_norm(wide[:, :64].contiguous(), weight, 1e-6))
    assert torch.equal(found, ops(level).rms_norm(wide[:, :64].contiguous(), weight, 1e-6))


@pytest.mark.parametrize("level", LEVELS)
def test_heads_that_lie_apart_are_normalised_too(level: str) -> None:
    qkv, weight = torch.randn(3, 6, 16), torch.rand(16)
    found = ops(level).rms_norm(qkv[:, 2:4], weight, 1e-6)
    assert torch.equal(found, ops(level).rms_norm(qkv[:, 2:4].contiguous(), weight, 1e-6))
