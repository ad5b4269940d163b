"""Tiles are changed where products with codes and attention are launched, and nowhere else."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu.tiles import OF_CODES, with_changes
from octavo.devices.cuda.runtime import CudaRuntime, launch_by_triton
from octavo.ops.prepare_quantized import INT4


def test_a_product_with_another_tile_has_the_same_bits() -> None:
    launched: list[tuple[str, int]] = []

    def launch(kernel: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        launched.append((kernel, constants.get("BN", 0)))
        launch_by_triton(kernel, grid, *arguments, **constants)

    x, weight = torch.randn(2, 100), torch.randn(40, 100)
    changes = {"BN": 32}
    assert changes in OF_CODES
    plain, changed = (
        CudaRuntime(launch=each).bind().prepare_quantized(INT4)(weight)(x)
        for each in (launch, with_changes(changes, launch))
    )
    assert torch.equal(plain, changed)
    assert launched == [
        ("coded.quantize", 0),
        ("coded.coded_linear", 16),
        ("coded.quantize", 0),
        ("coded.coded_linear", 32),
    ]
