"""The format of weights that are kept as they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from octavo.ops.registry import bind
from octavo.quantization.method import UNQUANTIZED


@pytest.mark.parametrize("bias", [False, True])
def test_what_is_filled_is_multiplied(bias: bool) -> None:
    method, layer = UNQUANTIZED, nn.Module()
    method.make(layer, 5, 4, bias)
    assert [name for name, _ in layer.named_parameters()] == ["weight", *(["bias"] if bias else [])]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    ops = bind()
    prepared = method.finish(layer, ops)
    x = torch.randn(2, 5)
    expected = x @ layer.get_parameter("weight").T + (layer.get_parameter("bias") if bias else 0)
    torch.testing.assert_close(prepared(x), expected)
    gate, up = expected.chunk(2, dim=1)
    torch.testing.assert_close(method.finish(layer, ops, gated=True)(x), torch.nn.functional.silu(gate) * up)
    assert torch.equal(method.format(ops).restore(prepared.shape, prepared.state())(x), prepared(x))
