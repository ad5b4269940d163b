"""Functions of torch whose bits depend on neighbours, made exact."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.models.fallback.exact import make_exact

WEIGHT = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "a method": lambda x: x.sigmoid(),
    "rsqrt": lambda x: x.abs().rsqrt(),
    "silu": F.silu,
    "softplus": F.softplus,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "of another tensor": lambda x: x.abs().pow(torch.full_like(x, 0.5)),
}


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.forward = function


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_beside_others(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    module = Function(function)
    make_exact(module)
    x = torch.randn(5, 211, 17, generator=torch.Generator().manual_seed(1)).to(dtype)
    together = module(x)
    assert torch.equal(together, torch.stack([module(row[None])[0] for row in x.view(-1, 17)]).view(5, 211, -1))
    torch.testing.assert_close(together, function(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_has_the_same_bits_whatever_stands_beside_it(dtype: torch.dtype) -> None:
    weight = WEIGHT.to(dtype)
    module = Function(lambda x: F.linear(x, weight))
    make_exact(module)
    x = torch.randn(133, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    together = module(x)
    for count in (1, 2, 7):
        parts = [module(x[start : start + count]) for start in range(0, 133, count)]
        assert torch.equal(together, torch.cat(parts))
