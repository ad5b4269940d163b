"""Products with stored codes: their values, what activations lose, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from octavo.errors import CheckpointError, ConfigError
from octavo.ops.coded import HALF_BASE, CodedFormat, CodeSpec, example_specs, example_weight, quantize_activations
from octavo.ops.codes import NotFinite

SPECS = list(example_specs())


def weight_of(spec: CodeSpec, outputs: int = 18, inputs: int = 80) -> dict[str, Tensor]:
    return example_weight(spec, outputs, inputs, torch.Generator().manual_seed(3))


def value_of(spec: CodeSpec, weight: dict[str, Tensor], row: int, column: int) -> float:
    """One value by the definition."""
    group, factor = column // spec.group if spec.group else 0, column // 256 if spec.super_group else None
    code = weight["codes"][row, column].item()
    if spec.is_float:
        code = (0, 0.5, 1, 1.5, 2, 3, 4, 6)[int(code) & 7] * (-1 if code > 7 else 1)
    scale = weight["scales"][row, group].item()
    minimum = weight["minimums"][row, group].item() if spec.zero == "minimums" else 0.0
    if factor is not None:
        scale *= weight["super_scales"][row, factor].item()
        minimum *= weight["super_minimums"][row, factor].item() if minimum else 1.0
    zero = weight["zeros"][row, group].item() if spec.zero == "zeros" else 0
    return (code - zero) * scale - minimum


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.layout)
def test_values_are_codes_with_scales_and_zero_points(spec: CodeSpec) -> None:
    weight = weight_of(spec)
    found = spec.dequantized(weight)
    for row, column in ((0, 0), (3, 17), (17, 79), (9, 63), (5, 32)):
        at = int(weight["order"][column]) if spec.has_order else column
        assert found[row, at].item() == pytest.approx(value_of(spec, weight, row, column), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.layout)
@pytest.mark.parametrize(("bits", "most"), [(8, 2e-2), (16, 1e-4)])
def test_a_product_loses_only_the_rounding_of_activations(spec: CodeSpec, bits: int, most: float) -> None:
    weight, x = weight_of(spec), torch.randn((5, 80), generator=torch.Generator().manual_seed(4))
    prepared = CodedFormat(replace(spec, activation_bits=bits))(weight, torch.float32)
    expected = x.double() @ spec.dequantized(weight).double().T
    found = prepared(x)
    assert (found - expected).norm() < most * expected.norm()
    assert torch.equal(prepared(x[2:3]), found[2:3])


@pytest.mark.parametrize(("bits", "error"), [(8, 0.8e-2), (16, 0.003e-2)])
def test_the_error_that_is_explained_is_that_of_a_product(bits: int, error: float) -> None:
    generator = torch.Generator().manual_seed(5)
    x, weight = torch.randn((32, 2048), generator=generator), torch.randn((64, 2048), generator=generator)
    codes, scales = quantize_activations(x, bits)
    rounded = (codes[0] if bits == 8 else codes[0] * HALF_BASE + codes[1]) * scales
    found = ((rounded - x) @ weight.T).norm() / (x @ weight.T).norm()
    assert found == pytest.approx(error, rel=0.15)


def test_the_layout_depends_on_the_weight_alone() -> None:
    assert len({spec.layout for spec in SPECS}) == len({replace(spec, activation_bits=8) for spec in SPECS})
    assert CodedFormat(SPECS[0]).layout == CodedFormat(replace(SPECS[0], activation_bits=16)).layout


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"bits": 3}, "3 bits, expected 4 or 8"),
        ({"group": 48}, "groups of 48, expected 16, 32 or a multiple of 64"),
        ({"scale_dtype": torch.float64}, "scales in torch.float64"),
        ({"super_group": 256}, "scales in torch.bfloat16"),
        ({"activation_bits": 4}, "activations of 4 bits"),
        ({"is_float": True, "zero": "zeros"}, "floats with zero points"),
    ],
)
def test_a_kind_without_a_kernel_is_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        replace(SPECS[0], **changes)


def test_tensors_that_cannot_be_computed_with_are_refused() -> None:
    spec = SPECS[2]
    weight = weight_of(spec)
    with pytest.raises(CheckpointError, match="order of a stored weight is no permutation of its 80 inputs"):
        spec.check({**weight, "order": torch.zeros(80, dtype=torch.int32)})
    with pytest.raises(CheckpointError, match="zeros of a stored weight is None, expected"):
        spec.check({name: tensor for name, tensor in weight.items() if name != "zeros"})
    weight["scales"][7, 1] = float("nan")
    with pytest.raises(NotFinite, match="row 7"):
        spec.check(weight)
