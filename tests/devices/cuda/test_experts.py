"""Stacks of experts on CUDA, interpreted: the bits of single weights, with no row counted on the host."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernels of the device cuda need Triton")

from octavo.devices.cuda import experts
from octavo.devices.cuda.runtime import CudaRuntime
from octavo.ops.prepare_linear import PlainFormat
from tests.ops.test_experts import TOP_K, expert_of, make_stack, route_tokens


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
    monkeypatch.setattr(experts, "_MANY", 1 if has_many else 1 << 30)
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
