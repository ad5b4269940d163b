"""Hyper-connections have the same bits alone, in any batch and on any threads, at every level; NaN stays in its row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.devices.cpu.runtime import CpuRuntime
from octavo.ops import hyper
from tests.conformance.runtimes import LEVELS

pytestmark = pytest.mark.skipif(not LEVELS, reason="the compiled kernels cannot run on this machine")
TOKENS = 37
"""More than two vectors of rows."""


def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def results(ops: Any, rows: slice, count: int, dim: int, dtype: torch.dtype, x: Tensor) -> list[Tensor]:
    """Everything that a block does with some rows of streams x, which lie apart, and products that do too."""
    outputs = count * (count + 2)
    scale, base = torch.tensor([0.7, 1.2, 0.9]), made(outputs)
    products, out = made(TOKENS, outputs + 3)[rows, :outputs], made(TOKENS, dim, dtype=dtype)[rows]
    mixing = ops.stream_mixing(products, scale, base, 20, 1e-6)
    plain = ops.plain_mixing(products[:, : 2 * count], scale[:2], base[: 2 * count], 2.5, 1e-6)
    weights = ops.stream_weights(products[:, 1 : count + 1], scale[:1], base[:count], 1e-6)
    own = x[rows]
    return [
        *mixing,
        *plain,
        weights,
        ops.weighed_stream(own, mixing.read),
        ops.mixed_streams(own, out, mixing.write, mixing.mix),
        ops.normed_streams(own, made(count * dim), 1e-5),
        ops.repeated_streams(own, 3),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "dim"), [(4, 128), (3, 37), (1, 20), (8, 50)])
@pytest.mark.parametrize("level", LEVELS)
def test_rows_have_the_bits_of_the_whole_batch(level: str, count: int, dim: int, dtype: torch.dtype) -> None:
    x = made(TOKENS, count * dim + 5, dtype=dtype)[:, : count * dim]
    ops = CpuRuntime.open(1, level).bind()
    whole = results(ops, slice(None), count, dim, dtype, x)
    expected = results(hyper, slice(None), count, dim, dtype, x)
    for found, wanted in zip(whole, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-2 if dtype is torch.bfloat16 else 1e-4, atol=1e-5)
    for threads in (1, 2):
        ops = CpuRuntime.open(threads, level).bind()
        for rows in (slice(0, 1), slice(16, 17), slice(5, 30), slice(36, 37), slice(None)):
            for found, wanted in zip(results(ops, rows, count, dim, dtype, x), whole, strict=True):
                assert torch.equal(found, wanted[rows])


@pytest.mark.parametrize("level", LEVELS)
def test_nan_stays_in_its_row(level: str) -> None:
    count, dim, outputs = 4, 40, 24
    ops = CpuRuntime.open(1, level).bind()
    products, x, out = made(TOKENS, outputs), made(TOKENS, count * dim), made(TOKENS, dim)
    clean = ops.stream_mixing(products, torch.ones(3), torch.zeros(outputs), 3, 1e-6)
    products[7], x[7] = torch.nan, torch.nan
    mixing = ops.stream_mixing(products, torch.ones(3), torch.zeros(outputs), 3, 1e-6)
    streams = ops.mixed_streams(x, out, mixing.write, mixing.mix)
    others = torch.arange(TOKENS) != 7
    for found, wanted in zip(mixing, clean, strict=True):
        assert found[7].isnan().all()
        assert torch.equal(found[others], wanted[others])
    assert streams[7].isnan().all()
    assert streams[others].isfinite().all()


def test_more_streams_than_kernels_take_are_left_to_the_reference() -> None:
    x, weights, products = made(2, 9 * 16), made(2, 9), made(2, 9 * 11)
    ops = CpuRuntime.open().bind()
    assert torch.equal(ops.weighed_stream(x, weights), hyper.weighed_stream(x, weights))
    given = products, torch.ones(3), torch.zeros(99), 2, 1e-6
    for found, wanted in zip(ops.stream_mixing(*given), hyper.stream_mixing(*given), strict=True):
        assert torch.equal(found, wanted)
