"""Each reference against its formula in float64, on its own examples, and every bound kernel against its reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.ops.registry import Operator, bind, operators
from octavo.ops.rotary import rotary_table

OPERATORS = operators()


def rms(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight + offset)


def layer(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    return scaled * (1 if weight is None else weight) + (0 if bias is None else bias)


def rotated(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    table: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps_and_offset: tuple[float, float],
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """Pairs are complex numbers, multiplied by one of length one; what lies beyond the rotated elements stays."""
    half = table.shape[1] // 2
    factors = torch.complex(table[:, :half], table[:, half:])[positions].unsqueeze(1)

    def turn(x: Tensor) -> Tensor:
        inner, rest = x[..., : 2 * half], x[..., 2 * half :]
        pairs = inner.unflatten(-1, (half, 2)) if interleaved else inner.unflatten(-1, (2, half)).transpose(-1, -2)
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * factors)
        return torch.cat(((turned if interleaved else turned.transpose(-1, -2)).flatten(-2), rest), dim=-1)

    if q_weight is not None and k_weight is not None:
        q, k = rms(q, q_weight, *eps_and_offset), rms(k, k_weight, *eps_and_offset)
    return turn(q), turn(k)


def angles(frequencies: Tensor, num_positions: int, factor: float) -> Tensor:
    # an angle is rounded to float32 before it is turned: what models are trained with
    rounded = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies.float()).double()
    return factor * torch.cat((rounded.cos(), rounded.sin()), dim=-1)


def erf_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x[:, :half] / (1 + torch.exp(-x[:, :half])) * x[:, half:]


def linear(
    x: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None, is_gated: bool, add: Tensor | None
) -> tuple[Tensor, Tensor]:
    product = torch.einsum("ti,oi->to", x, weight) + (0 if bias is None else bias) + (0 if add is None else add)
    return gated(product) if is_gated else product, weight[ids]


FORMULAS: dict[str, Callable[..., Any]] = {
    "prepare_linear": linear,
    "embedding": lambda ids, weight, offset: torch.stack([weight[i + offset] for i in ids.tolist()]),
    "add": lambda x, y: y + x,
    "rms_norm": rms,
    "add_rms_norm": lambda x, residual, *rest: (rms(x + residual, *rest), x + residual),
    "layer_norm": layer,
    "add_layer_norm": lambda x, residual, weight, bias, eps: (layer(x + residual, weight, bias, eps), x + residual),
    "rotary": rotated,
    "rotary_table": angles,
    "silu_and_mul": gated,
    "gelu": erf_gelu,
    "gelu_tanh": tanh_gelu,
    "relu": lambda x: x * (x > 0),
    "gelu_tanh_and_mul": lambda x: tanh_gelu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "silu_times": lambda gate, x: x * gate / (1 + torch.exp(-gate)),
    "gated_by_sigmoid": lambda x, gate: x / (1 + torch.exp(-gate)),
    "gated_by_softplus": lambda x, gate: x * torch.log1p(torch.exp(gate)),
    "multiplied": lambda x, y: y * x,
    "scaled": lambda x, factor: factor * x,
    "soft_capped": lambda x, cap: cap * (1 - 2 / (torch.exp(2 * x / cap) + 1)),
}


def in_float64(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def assert_close(found: Any, expected: Any, tolerance: float) -> None:
    found, expected = ((each,) if isinstance(each, Tensor) else each for each in (found, expected))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FORMULAS)
def test_a_reference_computes_its_formula(name: str, dtype: torch.dtype) -> None:
    operator = OPERATORS[name]
    examples = list(operator.examples(dtype))
    assert examples
    for arguments in examples:
        found = operator.trial(operator.reference, *arguments)
        first = found if isinstance(found, Tensor) else found[0]
        assert first.dtype == (torch.float32 if name == "rotary_table" else dtype)
        assert_close(found, FORMULAS[name](*map(in_float64, arguments)), operator.tolerance[dtype])


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS.keys())
def test_what_is_bound_here_agrees_with_the_reference(operator: Operator) -> None:
    bound = getattr(bind(), operator.name)
    for arguments in operator.examples(torch.float32):
        expected = operator.trial(operator.reference, *arguments)
        assert_close(operator.trial(bound, *arguments), expected, operator.tolerance[torch.float32])


def test_inputs_are_left_as_they_were() -> None:
    for name in FORMULAS:
        for arguments in OPERATORS[name].examples(torch.float32):
            before = [each.clone() if isinstance(each, Tensor) else each for each in arguments]
            OPERATORS[name].trial(OPERATORS[name].reference, *arguments)
            for one, other in zip(before, arguments, strict=True):
                assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_rounds_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 96, generator=generator).to(dtype)
    weight = (torch.rand(96, generator=generator) + 0.5).to(dtype)
    exact = rms(x.double(), weight.double(), 1e-6)
    once = operators()["rms_norm"].reference(x, weight, 1e-6)
    assert torch.equal(once, exact.to(dtype))
    twice = rms(x.float(), torch.ones(96), 1e-6).to(dtype) * weight
    unit = torch.finfo(dtype).eps * 2.0 ** exact.abs().log2().floor()
    assert ((twice - once).abs() <= unit).all()
    assert (twice - exact).abs().sum() > (once - exact).abs().sum()


def test_rotary_tables_hold_the_angles_of_positions() -> None:
    table = rotary_table(torch.tensor([1.0, 0.25]), 4)
    angles = [3, 0.75]
    torch.testing.assert_close(table[3], torch.tensor([*map(math.cos, angles), *map(math.sin, angles)]))
    assert torch.equal(table[0], torch.tensor([1.0, 1.0, 0.0, 0.0]))
    torch.testing.assert_close(rotary_table(torch.tensor([1.0, 0.25]), 4, 1.5), table * 1.5)
