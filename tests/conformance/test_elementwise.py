"""Functions of single elements: every value that there is in bfloat16, odd widths, rows that lie apart."""

from __future__ import annotations

import pytest
import torch

from octavo.ops.registry import operators
from tests.conformance.runtimes import TYPES, levels_of, ops

UNITS = levels_of("elementwise")

ACTIVATIONS = ("relu", "gelu", "gelu_tanh")
REFERENCES = {name: operator.reference for name, operator in operators().items()}


@pytest.mark.parametrize("level", UNITS)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_bfloat16_is_within_a_unit_of_the_exact_value(name: str, level: str) -> None:
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.bfloat16).view(256, 256)
    found, exact = getattr(ops(level), name)(x), REFERENCES[name](x.double())
    assert torch.equal(found.isnan(), exact.isnan())
    finite = exact.isfinite()
    difference = (found[finite].double() - exact[finite]).abs()
    # half a unit of rounding, and what float32 loses where the two halves of gelu cancel
    assert (difference <= exact[finite].abs() * 2.0**-8 + 2e-6).all()
    assert torch.equal(found[exact.isinf()].double(), exact[exact.isinf()])


@pytest.mark.parametrize("level", UNITS)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_float32_is_close_over_the_whole_range(name: str, level: str) -> None:
    x = torch.cat((torch.linspace(-12, 12, 40_001), torch.logspace(-30, 30, 2001), -torch.logspace(-30, 30, 2001)))
    x = x[None].contiguous()
    exact = REFERENCES[name](x.double())
    difference = (getattr(ops(level), name)(x).double() - exact).abs()
    assert (difference <= 4e-7 * exact.abs() + 8e-7).all()


@pytest.mark.parametrize("level", UNITS)
def test_the_gate_saturates_and_keeps_nan(level: str) -> None:
    gate = torch.tensor([[-200.0, -90.0, -1.0, 0.0, 1.0, 90.0, 200.0, float("nan")]])
    x = torch.cat((gate, torch.full_like(gate, 3.0)), dim=1)
    found, expected = ops(level).silu_and_mul(x), REFERENCES["silu_and_mul"](x)
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("level", UNITS)
@pytest.mark.parametrize("name", [*ACTIVATIONS, "silu_and_mul", "add"])
def test_an_element_has_the_same_bits_wherever_it_lies(name: str, level: str, dtype: torch.dtype) -> None:
    for width in (2, 14, 86, 1030):
        wide = torch.randn(21, width + 10).to(dtype)
        x = wide[:, :width]  # rows that lie apart
        arguments = (x, wide[:, 10:].contiguous()) if name == "add" else (x,)
        whole = getattr(ops(level), name)(*arguments)
        assert torch.equal(whole, getattr(ops(level, 2), name)(*arguments))
        if name == "add":
            assert torch.equal(whole, arguments[0] + arguments[1])
        for piece in (slice(0, 1), slice(20, 21), slice(3, 15)):
            alone = getattr(ops(level), name)(*(each[piece].clone() for each in arguments))
            assert torch.equal(alone, whole[piece])


@pytest.mark.parametrize("level", UNITS)
def test_operands_of_different_shapes_are_not_added(level: str) -> None:
    with pytest.raises(AssertionError, match=r"\(1, 8\) does not go with \(2, 8\)"):
        ops(level).add(torch.zeros(2, 8), torch.zeros(1, 8))


@pytest.mark.parametrize("level", UNITS)
def test_the_exponential_of_the_gate_is_exact_to_units_in_the_last_place(level: str) -> None:
    gate = torch.cat((torch.linspace(-87, 87, 100_003), torch.zeros(1)))[None]
    exact = gate.double() / (1 + torch.exp(-gate.double()))
    found = ops(level).silu_and_mul(torch.cat((gate, torch.ones_like(gate)), dim=1))
    assert ((found.double() - exact).abs() <= 3e-7 * exact.abs()).all()
