"""Products with stored codes: the reference's bits at every level, and bits that depend on the row alone."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from octavo.ops.coded import CodedFormat, CodeSpec, example_specs, example_weight
from octavo.ops.experts import RouterRule, route
from octavo.ops.prepare_linear import PreparedLinear, TensorSpec
from tests.conformance.runtimes import levels_of, ops

UNITS = levels_of("quantized")

SPECS = (
    *example_specs(),
    CodeSpec(8, 0, "zeros", torch.float16, has_order=True),
    CodeSpec(4, 256, "zeros", torch.bfloat16, activation_bits=16),
    CodeSpec(8, 16, "none", torch.int8, 256, activation_bits=16),
)


@cache
def inputs_of(spec: CodeSpec, inputs: int, outputs: int, rows: int) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(inputs + outputs)
    weight = example_weight(spec, outputs, inputs, generator)
    return torch.randn((rows, inputs), generator=generator), weight, torch.randn(outputs, generator=generator)


def prepared(level: str, spec: CodeSpec, weight: dict[str, Tensor], bias: Tensor, threads: int = 1) -> PreparedLinear:
    made: PreparedLinear = ops(level, threads).prepare_coded(spec)(weight, torch.float32, bias)
    return made


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.layout}-{spec.activation_bits}")
@pytest.mark.parametrize("level", UNITS)
def test_values_and_products_are_those_of_the_reference(level: str, spec: CodeSpec) -> None:
    for inputs, outputs in ((80, 18), (512, 70)):
        x, weight, bias = inputs_of(spec, inputs, outputs, 35)
        x[2] = 0.0
        expected = CodedFormat(spec)(weight, torch.float32, bias)
        found = prepared(level, spec, weight, bias)
        ids = torch.arange(outputs)
        assert torch.equal(found.rows(ids), expected.rows(ids))
        whole = expected(x)
        assert torch.equal(found(x), whole)
        for start, stop in ((0, 1), (3, 5), (30, 35), (7, 20)):
            assert torch.equal(found(x[start:stop]), whole[start:stop])
        assert torch.equal(prepared(level, spec, weight, bias, 2)(x), whole)


@pytest.mark.parametrize("level", UNITS)
def test_long_groups_and_many_rows_are_taken_in_parts(level: str) -> None:
    """Groups longer than what tiles widen at once, numbers of groups that fill no turn, activations beyond a cache."""
    for spec, inputs, outputs, rows in (
        (CodeSpec(4, 0, "zeros", torch.bfloat16, activation_bits=16), 4300, 33, 70),
        (CodeSpec(4, 576, "none", torch.float16), 1300, 70, 37),
        (CodeSpec(4, 192, "minimums", torch.float32), 1300, 70, 37),
    ):
        x, weight, bias = inputs_of(spec, inputs, outputs, rows)
        whole = CodedFormat(spec)(weight, torch.float32, bias)(x)
        layer = prepared(level, spec, weight, bias, 2)
        assert torch.equal(layer(x), whole)
        assert torch.equal(layer(x[-3:]), whole[-3:])


@pytest.mark.parametrize("level", UNITS)
def test_the_largest_sums_do_not_overflow(level: str) -> None:
    x = torch.ones((7, 512))
    for spec in (replace(each, activation_bits=8) for each in SPECS):
        weight = inputs_of(spec, 512, 70, 1)[1]
        codes = weight["codes"]
        for extreme in (torch.iinfo(codes.dtype).min, torch.iinfo(codes.dtype).max) if spec.bits == 8 else ():
            filled = {**weight, "codes": torch.full_like(codes, extreme)}
            expected = CodedFormat(spec)(filled, torch.float32, torch.zeros(70))(x)
            assert torch.equal(prepared(level, spec, filled, torch.zeros(70))(x), expected)


@pytest.mark.parametrize("level", UNITS)
def test_gates_addends_and_other_types_are_those_of_the_reference(level: str) -> None:
    for spec in (SPECS[2], SPECS[4], SPECS[12]):
        x, weight, bias = inputs_of(spec, 256, 72, 9)
        add = torch.randn(9, 72, generator=torch.Generator().manual_seed(1))
        for dtype in (torch.bfloat16, torch.float16):
            expected = CodedFormat(spec)(weight, dtype, bias.to(dtype), gated=True)(x.to(dtype), add)
            found = ops(level).prepare_coded(spec)(weight, dtype, bias.to(dtype), gated=True)(x.to(dtype), add)
            torch.testing.assert_close(found, expected, rtol=8e-3, atol=1e-5)


@pytest.mark.parametrize("level", UNITS)
def test_experts_multiply_like_layers_of_their_own(level: str) -> None:
    for spec in (SPECS[2], SPECS[5], SPECS[12]):
        make = ops(level).prepare_coded(spec)
        generator = torch.Generator().manual_seed(3)
        weights = [example_weight(spec, 48, 128, generator) for _ in range(4)]
        layers = [make(weight, torch.float32) for weight in weights]
        names = layers[0].state()
        stack = make.restore_stack(
            layers[0].shape, {each: torch.stack([x.state()[each] for x in layers]) for each in names}
        )
        x = torch.randn((11, 128), generator=generator)
        routing = route(torch.randn((11, 4), generator=generator), RouterRule(2))
        found = stack(x, routing, of_tokens=True)
        for row, pair in enumerate(routing.order.tolist()):
            expert = int((routing.starts[1:] <= row).sum())
            assert torch.equal(found[row], layers[expert](x[pair // 2 : pair // 2 + 1])[0])


@pytest.mark.parametrize("level", UNITS[:1])
def test_a_state_is_what_was_promised_and_as_large_as_the_stored_weight(level: str) -> None:
    bits = {}
    for spec in example_specs():
        _, weight, bias = inputs_of(spec, 1024, 64, 1)
        make = ops(level).prepare_coded(spec)
        layer = prepared(level, spec, weight, bias)
        assert {name: TensorSpec.of(each) for name, each in layer.state().items()} == make.state_specs(layer.shape)
        bits[spec.layout] = layer.state()["panels"].nbytes * 8 / weight["codes"].numel()
    assert bits == {
        "int4-g128-none-bfloat16": 4.125,
        "int4-g32-zeros-float16": 5.0,
        "int4-g64-zeros-float16-ordered": 4.5,
        "int4-g32-minimums-float16": 5.0,
        "int4-g32-minimums-int8-of-256": 4.625,
        "float4-g16-none-float32": 6.0,
        "int4-g0-zeros-bfloat16": 4 + 32 / 1024,
        "int8-g16-none-int8-of-256": 8.5625,
        "int8-g32-none-float16": 8.5,
        "int8-g32-minimums-int8-of-256": 8.625,
        "int8-g128-zeros-float32": 8.375,
        "int8-g0-none-float32": 8 + 32 / 1024,
        "int4-g32-none-float16": 4.5,
    }
