"""Linear layers in panels: near the product in float64, and bits that depend on the row alone.

Tolerances are relative to the sum of the products' magnitudes, the scale of a sum's rounding errors: in float32 the
answer is within 2e-6 of it, in bfloat16 within one rounding of the answer more.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.devices.cpu.ops.linear import PanelFormat
from octavo.ops.prepare_linear import (
    LinearFormat,
    LinearShape,
    PlainFormat,
    PreparedLinear,
    TensorSpec,
    heads_apart,
)
from tests.conformance.runtimes import LEVELS, TYPES, ops, runtime

ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
SHAPES = ((8, 1), (1, 40), (32, 64), (33, 31), (64, 18), (257, 70), (1030, 34))
"""(inputs, outputs)"""
ROWS = (1, 2, 3, 5, 8, 13, 16, 17, 29, 33, 70)

each_level = pytest.mark.parametrize("level", LEVELS)
each_type = pytest.mark.parametrize("dtype", TYPES, ids=str)


def format_of(level: str, threads: int = 1) -> LinearFormat:
    found: LinearFormat = ops(level, threads).prepare_linear
    return found


def made(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype, *, bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """x, weight, bias."""
    generator = torch.Generator().manual_seed(rows * inputs + outputs)
    x, weight = torch.randn(rows, inputs, generator=generator), torch.randn(outputs, inputs, generator=generator)
    shift = torch.randn(outputs, generator=generator).to(dtype) if bias else None
    return x.to(dtype), (weight / inputs**0.5).to(dtype), shift


def check(
    found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *, gated: bool, add: Tensor | None = None
) -> None:
    """Compare with the product in float64."""
    exact, scale = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
    if bias is not None:
        exact, scale = exact + bias.double(), scale + bias.double().abs()
    if add is not None:
        exact, scale = exact + add.double(), scale + add.double().abs()
    error = scale * 2e-6
    if gated:
        gate, up = exact.chunk(2, dim=1)
        gate_error, up_error = error.chunk(2, dim=1)
        exact = torch.nn.functional.silu(gate) * up
        # the derivative of SiLU is at most 1.1
        error = 1.1 * gate_error * up.abs() + torch.nn.functional.silu(gate).abs() * (up_error + 1e-6)
    allowed = error + exact.abs() * ROUNDING[found.dtype] + 1e-30
    assert ((found.double() - exact).abs() <= allowed).all()


@each_type
@each_level
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
def test_a_product_is_near_the_one_in_float64(level: str, dtype: torch.dtype, bias: bool, gated: bool) -> None:
    for inputs, outputs in SHAPES:
        if gated and outputs % 2:
            continue
        for rows in ROWS:
            x, weight, shift = made(rows, inputs, outputs, dtype, bias=bias)
            found = format_of(level)(weight, shift, gated=gated)(x)
            assert found.shape == (rows, outputs // 2 if gated else outputs)
            assert found.dtype is dtype
            check(found, x, weight, shift, gated=gated)


@each_type
@each_level
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_an_addend_enters_before_the_activation_each_row_by_itself(level: str, dtype: torch.dtype, gated: bool) -> None:
    for inputs, outputs in ((32, 64), (64, 18), (257, 70), (1030, 34)):
        for rows in (1, 3, 16, 37):
            x, weight, bias = made(rows, inputs, outputs, dtype, bias=True)
            wide = torch.randn(rows, outputs + 5, generator=torch.Generator().manual_seed(rows)) * 3
            add = wide[:, :outputs]  # rows that lie apart
            prepared, without = (format_of(level)(weight, shift, gated=gated) for shift in (bias, None))
            found = prepared(x, add).clone()
            check(found, x, weight, bias, gated=gated, add=add)
            # an addend that every row shares has the bits of a bias
            shared = bias.float().expand(rows, outputs).contiguous()
            assert torch.equal(without(x, shared), prepared(x))
            assert torch.equal(prepared(x[-1:], add[-1:]), found[-1:])
            assert torch.equal(prepared(x[rows // 2 :], add[rows // 2 :]), found[rows // 2 :])


@each_type
@each_level
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_a_row_has_the_same_bits_in_any_batch_with_any_threads(level: str, dtype: torch.dtype, gated: bool) -> None:
    most = 45 if level == "amx_emulated" else 190
    for inputs, outputs in ((33, 94), (320, 256), (1056, 160)):
        x, weight, bias = made(most, inputs, outputs, dtype, bias=True)
        alone, threaded = (format_of(level, threads)(weight, bias, gated=gated) for threads in (1, 2))
        # in float32, where no rounding hides a difference
        whole, rounded = alone.in_float32(x).clone(), alone(x).clone()
        assert torch.equal(threaded.in_float32(x), whole)
        assert torch.equal(threaded(x), rounded)
        for start in range(0, most, 9):
            for rows in range(1, min(20, most - start), 3):
                piece = alone.in_float32(x[start : start + rows])
                assert torch.equal(piece, whole[start : start + rows]), (inputs, start, rows)
        assert torch.equal(threaded(x[7:8]), rounded[7:8])


@each_level
def test_activations_beyond_the_second_level_cache_are_taken_in_groups_of_rows(level: str) -> None:
    rows, inputs, outputs = (40, 8000, 33) if level == "amx_emulated" else (600, 2080, 70)
    x, weight, _ = made(rows, inputs, outputs, torch.bfloat16, bias=False)
    found = format_of(level, 2)(weight)(x).clone()
    check(found, x, weight, None, gated=False)
    assert torch.equal(format_of(level)(weight)(x[-3:]), found[-3:])


@each_level
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_large_results_have_the_bits_of_small_ones(level: str, gated: bool) -> None:
    rows, results = 520, 1056
    for inputs in (33,) if level == "amx_emulated" else (33, 1056):  # taken at once, and part by part
        x, weight, _ = made(rows, inputs, results * (2 if gated else 1), torch.bfloat16, bias=False)
        prepared = format_of(level)(weight, gated=gated)
        pieces = torch.cat([prepared(x[first : first + 40]).clone() for first in range(0, rows, 40)])
        assert torch.equal(prepared(x), pieces)
        assert torch.equal(format_of(level, 2)(weight, gated=gated)(x), pieces)
        narrow = torch.zeros(rows, inputs + 3, dtype=torch.bfloat16)[:, :inputs].copy_(x)  # rows that lie apart
        assert torch.equal(prepared(narrow), pieces)


@each_type
@each_level
def test_what_is_not_finite_stays_in_its_row(level: str, dtype: torch.dtype) -> None:
    for inputs in (31, 64):
        x, weight, bias = made(20, inputs, 40, dtype, bias=True)
        prepared = format_of(level)(weight, bias)
        clean = prepared(x).clone()
        x[4, 3], x[5, inputs - 1], x[19, 0] = float("nan"), float("inf"), float("-inf")
        found = prepared(x)
        spoilt = torch.zeros(20, dtype=torch.bool)
        spoilt[[4, 5, 19]] = True
        assert torch.equal(found[~spoilt], clean[~spoilt])
        assert not found[spoilt].isfinite().any()


@each_type
@each_level
def test_rows_may_lie_apart(level: str, dtype: torch.dtype) -> None:
    wide, weight, _ = made(6, 200, 40, dtype, bias=False)
    prepared = format_of(level)(weight[:, :96])
    assert torch.equal(prepared(wide[:, 50:146]).clone(), prepared(wide[:, 50:146].contiguous()))


@each_type
@each_level
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_rows_of_the_weight_come_back_as_they_were(level: str, dtype: torch.dtype, gated: bool) -> None:
    for inputs, outputs in ((33, 70), (64, 36), (7, 2)):
        _, weight, _ = made(1, inputs, outputs, dtype, bias=False)
        ids = torch.tensor([outputs - 1, 0, outputs // 2, *range(outputs)])
        assert torch.equal(format_of(level, 2)(weight, gated=gated).rows(ids), weight[ids])


@each_level
def test_numbers_of_rows_are_checked(level: str) -> None:
    prepared = format_of(level)(torch.zeros(40, 8))
    for wrong in (40, -1):
        with pytest.raises(IndexError, match=f"row {wrong} of a table with 40 rows"):
            prepared.rows(torch.tensor([0, wrong]))


@each_level
def test_logits_in_float32_are_what_bfloat16_would_round(level: str) -> None:
    x, weight, _ = made(3, 64, 70, torch.bfloat16, bias=False)
    prepared = format_of(level)(weight)
    logits = prepared.in_float32(x)
    assert logits.dtype is torch.float32
    check(logits, x, weight, None, gated=False)
    assert torch.equal(logits.to(torch.bfloat16), prepared(x))


@each_type
def test_all_levels_read_the_same_state(dtype: torch.dtype) -> None:
    x, weight, bias = made(3, 70, 50, dtype, bias=True)
    for gated in (False, True):
        states = [format_of(level)(weight, bias, gated=gated).state() for level in LEVELS]
        shape = LinearShape(50, 70, dtype, has_bias=True, is_gated=gated)
        for level, state in zip(LEVELS, states, strict=True):
            assert {name: TensorSpec.of(each) for name, each in state.items()} == format_of(level).state_specs(shape)
            assert all(torch.equal(state[name], states[0][name]) for name in state)
            restored: PreparedLinear = format_of(level).restore(shape, states[0])
            assert torch.equal(restored(x).clone(), format_of(level)(weight, bias, gated=gated)(x))
            assert restored.nbytes == sum(each.nbytes for each in state.values())


@each_level
def test_a_recording_multiplies_what_lies_at_its_addresses(level: str) -> None:
    cpu = runtime(level, 1).cpu
    x, weight, _ = made(5, 70, 50, torch.bfloat16, bias=False)
    prepared = format_of(level)(weight)
    cpu.begin_recording()
    out = prepared(x)
    recording = cpu.end_recording()
    x.mul_(-1)
    expected = -out
    format_of(level)(torch.zeros(300, 300))(torch.zeros(200, 300))  # takes more room in between
    recording.run()
    assert torch.equal(out, expected)


@each_level
def test_types_without_kernels_stay_plain(level: str) -> None:
    x, weight, _ = made(2, 16, 8, torch.float16, bias=False)
    assert torch.equal(format_of(level)(weight)(x), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("level", LEVELS)
def test_logits_are_not_rounded_on_their_way_to_float32(level: str) -> None:
    x, weight, _ = made(3, 96, 70, torch.bfloat16, bias=False)
    prepared = ops(level).prepare_linear(weight)
    logits = prepared.in_float32(x)
    assert logits.dtype is torch.float32
    assert torch.equal(logits.bfloat16(), prepared(x))
    assert not torch.equal(logits, prepared(x).float())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_products_by_head_are_those_of_each_heads_weight_alone(level: str, dtype: torch.dtype) -> None:
    tokens, heads, inputs, outputs = 131, 3, 40, 24
    x = torch.randn(tokens, heads + 1, inputs).to(dtype)[:, :heads]
    weight = torch.zeros(heads, heads_apart(outputs), inputs, dtype=dtype)
    weight[:, :outputs] = torch.randn(heads, outputs, inputs).to(dtype) / inputs**0.5
    prepare = PanelFormat(runtime(level, 2))
    found = prepare(weight.flatten(0, 1)).by_head(x, outputs).clone()
    for head in range(heads):
        alone = prepare(weight[head, :outputs].contiguous())(x[:, head].contiguous())
        assert torch.equal(found[:, head], alone)
    assert torch.equal(prepare(weight.flatten(0, 1)).by_head(x[130:], outputs), found[130:])
    plain = PlainFormat()(weight.flatten(0, 1)).by_head(x, outputs)
    torch.testing.assert_close(found, plain, atol=1e-5 if dtype is torch.float32 else 3e-2, rtol=1e-5)
