"""Quantised keys and values, and the reference backend over them."""

from __future__ import annotations

import pytest
import torch

from octavo.attention.cache_format import dequantize, quantize
from octavo.devices.reference.attention import ReferenceBackend
from tests.conformance.paged import Heads, Sequences, Step

TYPES = (torch.int8, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_row_comes_back_within_half_a_step_of_its_largest_value(dtype: torch.dtype) -> None:
    x = torch.randn(50, 3, 64)
    codes, scales = quantize(x, dtype)
    assert (codes.dtype, scales.dtype, scales.shape) == (dtype, torch.float32, (50, 3, 1))
    found = dequantize(codes, scales, torch.float32)
    step = x.abs().amax(-1, keepdim=True) / 127 if dtype is torch.int8 else x.abs() / 8 + 1e-4
    assert ((found - x).abs() <= step * 0.51).all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_zeros_stay_zero_and_what_is_not_finite_spoils_its_row(dtype: torch.dtype) -> None:
    x = torch.ones(3, 8)
    x[0], x[1, 2] = 0.0, float("inf")
    found = dequantize(*quantize(x, dtype), torch.float32)
    assert (found[0] == 0).all()
    assert found[1].isnan().all()
    assert (found[2] == 1).all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_reference_reads_keys_and_values_as_they_are_stored(dtype: torch.dtype) -> None:
    sequences = Sequences.make(Heads(dim=24, window=30, block_size=8), [40, 13], torch.float32)
    steps: list[Step] = [[(0, 0, 20), (1, 0, 12)], [(1, 12, 13), (0, 20, 40)]]
    found = sequences.compute(ReferenceBackend(dtype), steps)
    for one, other in zip(found, sequences.expected(dtype), strict=True):
        torch.testing.assert_close(one.double(), other, atol=2e-6, rtol=1e-5)
