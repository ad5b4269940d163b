"""Weights that several formats hold side by side."""

from __future__ import annotations

import pytest
import torch

from octavo.devices.cpu.recorded_model import _Watch
from octavo.layers.side_by_side import SideBySide
from octavo.ops.coded import CodeSpec, example_weight
from octavo.ops.prepare_linear import LinearShape
from octavo.ops.registry import Ops, bind
from tests.conformance.runtimes import LEVELS, ops

SPECS = (CodeSpec(4, 32, "minimums", torch.int8, 256), CodeSpec(8, 16, "none", torch.int8, 256))


def parts_of(bound: Ops, dtype: torch.dtype, gated: bool) -> tuple[SideBySide, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    weights = [example_weight(spec, 40, 96, generator) for spec in SPECS]
    made = [bound.prepare_coded(spec)(each, dtype) for spec, each in zip(SPECS, weights, strict=True)]
    plain = [spec.dequantized(each) for spec, each in zip(SPECS, weights, strict=True)]
    return SideBySide(LinearShape(80, 96, dtype, is_gated=gated), {"/0": made[0], "/1": made[1]}), plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_the_product_is_that_of_the_parts(dtype: torch.dtype, gated: bool) -> None:
    for bound in (bind(), *(ops(level) for level in LEVELS[:1])):
        whole, plain = parts_of(bound, dtype, gated)
        x = torch.randn((5, 96), generator=torch.Generator().manual_seed(2)).to(dtype)
        add = torch.randn((5, 80), generator=torch.Generator().manual_seed(3))
        expected = x.float() @ torch.cat(plain).T + add
        if gated:
            expected = torch.nn.functional.silu(expected[:, :40]) * expected[:, 40:]
        torch.testing.assert_close(whole(x, add).float(), expected, rtol=0.03, atol=0.05)
        rows = whole.rows(torch.tensor([3, 77])).float()
        torch.testing.assert_close(rows, torch.cat(plain)[[3, 77]], rtol=8e-3, atol=1e-6)


@pytest.mark.parametrize("level", LEVELS[:1])
def test_nothing_but_kernels_computes_so_that_steps_are_recorded(level: str) -> None:
    whole, _ = parts_of(ops(level), torch.bfloat16, gated=False)
    with _Watch() as watch:
        whole(torch.empty((2, 96), dtype=torch.bfloat16))
    assert watch.obstacle is None
