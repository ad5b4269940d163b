"""Tiles are changed where a benchmark says so, and nowhere else; what they compute stays right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

from benchmarks.gpu import tiles
from benchmarks.gpu.tiles import OF_CODES, OF_PLAIN, with_changes
from octavo.devices.cuda.ops import linear as linear_module
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


@pytest.mark.parametrize(("shape", "is_gated"), [((256, 512), False), ((128, 256), True)])
def test_products_are_timed_with_each_tile_and_with_weights_in_turns(
    shape: tuple[int, int], is_gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, found = list[torch.Tensor](), list[tuple[torch.Tensor, torch.Tensor]]()
    outputs, inputs = shape

    def random(*size: int, **_: Any) -> torch.Tensor:
        made.append(torch.rand(size) - 0.5)
        return made[-1]

    def microseconds(call: Any) -> float:
        *_, x = made
        weights = [each for each in made if each.shape == shape][-2:]
        for weight in weights:
            whole = x.double() @ weight.double().T
            gate, up = whole.chunk(2, dim=-1)
            found.append((whole if not is_gated else torch.nn.functional.silu(gate) * up, call()))
        return 1.0

    monkeypatch.setattr(tiles, "microseconds", microseconds)
    monkeypatch.setattr(tiles, "COLD_BYTES", outputs * inputs + 1)
    monkeypatch.setattr(tiles, "PLAIN", () if is_gated else (shape,))
    monkeypatch.setattr(tiles, "GATED", (shape,) if is_gated else ())
    monkeypatch.setattr(torch, "randn", random)
    before = dict(linear_module._READING)
    assert [line["changed"] for line in tiles.plain((3,))] == list(OF_PLAIN)
    assert before == linear_module._READING
    assert len(found) == 2 * len(OF_PLAIN)
    for expected, got in found:
        assert torch.allclose(expected, got.double(), rtol=1e-4, atol=1e-4)
