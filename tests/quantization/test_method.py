"""The format of weights that are kept as they are."""

from __future__ import annotations

import pytest
import torch

from octavo.ops.prepare_linear import LinearShape
from octavo.ops.registry import bind
from octavo.quantization.method import UNQUANTIZED


@pytest.mark.parametrize("bias", [False, True])
def test_what_is_filled_is_multiplied(bias: bool) -> None:
    method, ops, shape = UNQUANTIZED, bind(), LinearShape(4, 5, torch.float32, bias)
    tensors = {name: torch.randn(spec.shape) for name, spec in method.tensors(shape).items()}
    assert list(tensors) == ["weight"]
    own = torch.randn(4) if bias else None
    prepared = method.pack(ops, shape, tensors, own)
    x = torch.randn(2, 5)
    expected = x @ tensors["weight"].T + (0 if own is None else own)
    torch.testing.assert_close(prepared(x), expected)
    gate, up = expected.chunk(2, dim=1)
    gated = method.pack(ops, LinearShape(4, 5, torch.float32, bias, True), tensors, own)
    torch.testing.assert_close(gated(x), torch.nn.functional.silu(gate) * up)
    assert torch.equal(method.format(ops).restore(prepared.shape, prepared.state())(x), prepared(x))
