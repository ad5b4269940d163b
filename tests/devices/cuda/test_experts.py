"""Stacks of experts on CUDA, interpreted: the bits of single weights, with no row counted on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

from octavo.devices import DEVICES
from octavo.devices.cuda.graphs import _HostReads
from octavo.devices.cuda.ops import linear
from octavo.devices.cuda.runtime import CudaRuntime
from octavo.ops.coded import CodedFormat, CodeSpec, example_specs, example_weight
from octavo.ops.prepare_linear import LinearShape, PlainFormat
from octavo.ops.prepare_quantized import INT4
from octavo.quantization.floats import NVFP4
from tests.devices.cuda.interpreted import NAME, RepeatedCalls
from tests.devices.cuda.test_engine import generate
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint
from tests.ops.test_experts import EXPERTS, TOP_K, expert_of, make_stack, route_tokens

KINDS = [(CodeSpec(4, 64, "zeros", torch.float16, has_order=True), True, 4), (NVFP4, False, 50)]
"""Of codes, with orders of inputs, and floats; whether gated, and tokens: of 50, tiles have more rows. The others are
tested when there is time."""
OTHERS = [
    pytest.param(spec, gated, tokens, marks=pytest.mark.long)
    for spec in example_specs()
    for gated, tokens in ((True, 50), (False, 4))
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gated", [True, False])
def test_rows_have_the_bits_of_their_experts_linear(gated: bool, dtype: torch.dtype) -> None:
    kept = CudaRuntime(is_invariant=True).bind().prepare_linear
    stack, linears = make_stack(kept, dtype, gated=gated, bias=not gated)
    for tokens in (1, 3, 90):
        routing = route_tokens(tokens)
        x = torch.randn((tokens, 96), generator=torch.Generator().manual_seed(tokens)).to(dtype)
        rows = x[routing.order.long() // TOP_K]
        found, again = stack(x, routing, of_tokens=True), stack(rows, routing, of_tokens=False, in_float32=True)
        for row in range(0, len(rows), 7):
            linear = linears[expert_of(routing, row)]
            assert torch.equal(found[row], linear(rows[row : row + 1])[0])
            assert torch.equal(again[row], linear.in_float32(rows[row : row + 1])[0])


@pytest.mark.parametrize("has_many", [True, False])
def test_rows_are_those_of_the_reference(has_many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_MANY_ROWS", 1 if has_many else 1 << 30)
    stack, _ = make_stack(CudaRuntime().bind().prepare_linear, torch.float32, gated=True, bias=True)
    expected, _ = make_stack(PlainFormat(), torch.float32, gated=True, bias=True)
    x, routing = torch.randn(200, 96), route_tokens(200)
    for of_tokens in (True, False):
        given = x if of_tokens else x[routing.order.long() // TOP_K]
        found = stack(given, routing, of_tokens=of_tokens)
        torch.testing.assert_close(found, expected(given, routing, of_tokens=of_tokens), rtol=1e-5, atol=1e-5)


def test_rows_of_experts_elsewhere_are_zeros() -> None:
    kept = CudaRuntime().bind().prepare_linear
    parts = [
        make_stack(kept, torch.float32, gated=True, bias=False, experts=each)[0] for each in (range(2), range(2, 5))
    ]
    whole, _ = make_stack(kept, torch.float32, gated=True, bias=False)
    routing, x = route_tokens(9), torch.randn(9, 96)
    first, second, both = (stack(x, routing, of_tokens=True) for stack in (*parts, whole))
    assert torch.equal(first + second, both)
    assert not torch.equal(first, both)


@pytest.mark.parametrize(("spec", "gated", "tokens"), [*KINDS, *OTHERS], ids=str)
def test_rows_of_coded_experts_have_the_bits_of_the_reference(spec: CodeSpec, gated: bool, tokens: int) -> None:
    """Bits of the exponential in SiLU apart: they are those of the experts' linears."""
    ops, generator = CudaRuntime().bind(), torch.Generator().manual_seed(0)
    shape = LinearShape(34, 80, torch.float32, has_bias=True, is_gated=gated)
    weights = [example_weight(spec, shape.outputs, shape.inputs, generator) for _ in range(EXPERTS)]
    pairs = list(zip(weights, torch.randn((EXPERTS, shape.outputs), generator=generator), strict=True))
    stacks = []
    for form, first in ((ops.prepare_coded(spec), 0), (ops.prepare_coded(spec), 1), (CodedFormat(spec), 0)):
        states = [form(weight, torch.float32, bias, gated=gated).state() for weight, bias in pairs]
        state = {name: torch.stack([each[name] for each in states[first:]]) for name in states[0]}
        stacks.append(form.restore_stack(shape, state, first))
    routing, x = route_tokens(tokens), torch.randn((tokens, shape.inputs), generator=generator)
    rows = x[routing.order.long() // TOP_K]
    with _HostReads() as watch:
        found = stacks[0](x, routing, of_tokens=True)
    assert watch.obstacle is None
    others, expected = (stack(x, routing, of_tokens=True) for stack in stacks[1:])
    assert torch.equal(stacks[0](rows, routing, of_tokens=False, in_float32=True), found)
    if gated:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        for row in range(0, len(rows), 7):
            weight, bias = pairs[expert_of(routing, row)]
            linear = ops.prepare_coded(spec)(weight, torch.float32, bias, gated=True)
            assert torch.equal(found[row], linear(rows[row : row + 1])[0])
    else:
        assert torch.equal(found, expected)
    is_elsewhere = torch.tensor([expert_of(routing, row) for row in range(len(rows))]) == 0
    assert torch.equal(others, found.masked_fill(is_elsewhere[:, None], 0.0))


def test_plain_weights_that_are_quantised_while_loading_make_the_same_stacks() -> None:
    ops, routing = CudaRuntime().bind(), route_tokens(3)
    stack, linears = make_stack(ops.prepare_quantized(INT4), torch.bfloat16, gated=True, bias=False)
    x = torch.randn((3, 96), generator=torch.Generator().manual_seed(9)).bfloat16()
    found, rows = stack(x, routing, of_tokens=True), x[routing.order.long() // TOP_K]
    expected = torch.cat([linears[expert_of(routing, row)](rows[row : row + 1]) for row in range(len(rows))])
    assert torch.equal(found, expected)


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_decode_steps_of_mixtures_are_captured(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "cuda", NAME)
    model = write_byte_tokenizer(make_checkpoint(family, tmp_path / "model", vocab_size=300))
    before = RepeatedCalls.num_replays
    int4: Any = {"quantization": "int4", "activation_bits": 8}
    found = generate(model, device="cuda", batch_invariant=True, **int4)
    assert RepeatedCalls.num_replays > before
    expected = generate(model, device="reference", **int4)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for args in ({"max_num_seqs": 1}, {"max_num_batched_tokens": 5}, {"enforce_eager": True}):
        assert generate(model, device="cuda", batch_invariant=True, **int4, **args) == found
