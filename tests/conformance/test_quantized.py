"""Quantised linear layers: the reference's integers at every level, bits that depend on the row alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.ops.prepare_quantized import QuantizedFormat
from octavo.quantization.registry import QUANTIZED
from tests.conformance.runtimes import LEVELS, levels_of, ops

UNITS = levels_of("quantized")

FORMATS = tuple(QUANTIZED)
SHAPES = ((64, 32), (704, 256), (200, 100), (48, 7), (1032, 33), (2112, 130))
"""(inputs, outputs): whole panels, and steps, groups and panels that end early."""


def inputs_of(inputs: int, outputs: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(inputs + outputs)
    x = torch.randn(rows, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    weight[outputs // 2] = 0.0  # a channel that does nothing
    weight[outputs // 3] *= 1e-4
    return x.to(dtype), weight.to(dtype), torch.randn(outputs, generator=generator).to(dtype)


def prepared(level: str, name: str, threads: int, *arguments: Any, **keywords: Any) -> Any:
    return ops(level, threads).prepare_quantized(QUANTIZED[name])(*arguments, **keywords)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("level", UNITS)
def test_codes_scales_and_products_are_those_of_the_reference(level: str, name: str, dtype: torch.dtype) -> None:
    for inputs, outputs in SHAPES:
        x, weight, bias = inputs_of(inputs, outputs, 19, dtype)
        expected = QuantizedFormat(QUANTIZED[name])(weight, bias)
        found = prepared(level, name, 1, weight, bias)
        ids = torch.arange(outputs)
        assert torch.equal(found.rows(ids), expected.rows(ids))
        assert torch.equal(found(x), expected(x))
        logits = found.in_float32(x).clone()
        assert torch.equal(logits, expected.in_float32(x))
        assert torch.equal(logits.to(dtype), found(x))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("level", UNITS)
def test_gate_and_up_are_multiplied_before_the_only_rounding(level: str, name: str) -> None:
    for inputs, outputs in ((64, 64), (200, 88), (704, 1408)):
        x, weight, bias = inputs_of(inputs, outputs, 5, torch.float32)
        expected = QuantizedFormat(QUANTIZED[name])(weight, bias, gated=True)
        found = prepared(level, name, 1, weight, bias, gated=True)
        ids = torch.arange(outputs)
        assert torch.equal(found.rows(ids), expected.rows(ids))
        torch.testing.assert_close(found(x), expected(x), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("level", UNITS)
def test_an_addend_enters_before_the_activation_each_row_by_itself(level: str, name: str) -> None:
    for inputs, outputs, rows in ((64, 64, 1), (200, 88, 5), (704, 300, 40)):
        for dtype in (torch.bfloat16, torch.float32):
            x, weight, bias = inputs_of(inputs, outputs, rows, dtype)
            add = torch.randn(rows, outputs + 3, generator=torch.Generator().manual_seed(rows))[:, :outputs]
            plain, gated = (prepared(level, name, 2, weight, bias, gated=gated) for gated in (False, True))
            assert torch.equal(plain(x, add), QuantizedFormat(QUANTIZED[name])(weight, bias)(x, add))
            expected = QuantizedFormat(QUANTIZED[name])(weight, bias, gated=True)(x, add)
            found = gated(x, add).clone()
            torch.testing.assert_close(found, expected, rtol=8e-3 if dtype is torch.bfloat16 else 1e-6, atol=1e-6)
            assert torch.equal(gated(x[-1:], add[-1:]), found[-1:])
            assert torch.equal(gated(x[: rows // 2 + 1], add[: rows // 2 + 1]), found[: rows // 2 + 1])


@pytest.mark.parametrize("name", FORMATS)
def test_all_levels_give_the_same_bits(name: str) -> None:
    x, weight, bias = inputs_of(1032, 200, 70, torch.float32)
    answers = [prepared(level, name, 1, weight, bias)(x).clone() for level in LEVELS]
    states = [prepared(level, name, 1, weight, bias).state() for level in LEVELS]
    for answer, state in zip(answers[1:], states[1:], strict=True):
        assert torch.equal(answer, answers[0])
        for key, tensor in states[0].items():
            assert torch.equal(state[key], tensor)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("level", UNITS)
def test_a_row_has_the_same_bits_alone_and_in_any_batch_on_any_number_of_threads(level: str, name: str) -> None:
    x, weight, _ = inputs_of(704, 300, 67, torch.bfloat16)
    x[3] = 0.0
    for gated in (False, True):
        whole = prepared(level, name, 1, weight, gated=gated)(x).clone()
        shared = prepared(level, name, 2, weight, gated=gated)
        assert torch.equal(shared(x), whole)
        for start, stop in ((0, 1), (66, 67), (3, 5), (1, 14), (2, 35), (0, 66)):
            assert torch.equal(shared(x[start:stop]), whole[start:stop])


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("level", UNITS)
def test_large_results_have_the_bits_of_small_ones(level: str, name: str, gated: bool) -> None:
    rows, results = 520, 1024
    x, weight, _ = inputs_of(64, results * (2 if gated else 1), rows, torch.bfloat16)
    found = prepared(level, name, 2, weight, gated=gated)
    pieces = torch.cat([found(x[first : first + 40]).clone() for first in range(0, rows, 40)])
    assert torch.equal(found(x), pieces)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("level", UNITS)
def test_a_row_that_is_not_finite_spoils_itself_alone(level: str, name: str) -> None:
    for gated in (False, True):
        x, weight, bias = inputs_of(200, 64, 20, torch.float32)
        layer = prepared(level, name, 1, weight, bias, gated=gated)
        sound = layer(x).clone()
        x[4, 7], x[11, 199], x[12, 0] = float("nan"), float("inf"), float("-inf")
        found = layer(x)
        spoilt = torch.zeros(20, dtype=torch.bool)
        spoilt[[4, 11, 12]] = True
        assert found[spoilt].isnan().all()
        assert torch.equal(found[~spoilt], sound[~spoilt])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("level", UNITS)
def test_rows_that_lie_apart_are_read_where_they_are(level: str, name: str) -> None:
    x, weight, _ = inputs_of(200, 64, 9, torch.bfloat16)
    wide = torch.zeros(9, 300, dtype=torch.bfloat16)
    wide[:, 50:250] = x
    layer = prepared(level, name, 1, weight)
    assert torch.equal(layer(wide[:, 50:250]), layer(x).clone())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("level", UNITS)
def test_the_state_is_what_was_promised_and_restores_the_layer(level: str, name: str) -> None:
    make = ops(level).prepare_quantized(QUANTIZED[name])
    x, weight, bias = inputs_of(200, 72, 3, torch.float32)
    for gated in (False, True):
        layer = make(weight, bias, gated=gated)
        specs = make.state_specs(layer.shape)
        assert {key: (tuple(each.shape), each.dtype) for key, each in layer.state().items()} == {
            key: (spec.shape, spec.dtype) for key, spec in specs.items()
        }
        assert torch.equal(make.restore(layer.shape, layer.state())(x), layer(x).clone())


@pytest.mark.parametrize("level", UNITS)
def test_sizes_are_what_the_formats_promise(level: str) -> None:
    _, weight, _ = inputs_of(1024, 1024, 1, torch.bfloat16)
    bits = {name: prepared(level, name, 1, weight).nbytes * 8 / weight.numel() for name in FORMATS}
    assert bits == {"int8": 8 + 32 / 1024, "int4": 4.25, "int4-g128": 4.125}
