"""The reference product gives a row the same bits beside any others."""

from __future__ import annotations

import pytest
import torch

from octavo.ops.prepare_linear import linear
from tests.fakes.exact_products import need_exact_products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_beside_others(dtype: torch.dtype) -> None:
    need_exact_products(dtype)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((70, 96), generator=generator).to(dtype)
    weight = torch.randn((200, 96), generator=generator).to(dtype)
    whole = linear(x, weight)
    for rows in range(1, 70):
        assert torch.equal(linear(x[:rows], weight), whole[:rows])
        assert torch.equal(linear(x[rows:], weight), whole[rows:])


def test_padding_leaves_no_trace() -> None:
    x, weight, bias = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)
    found = linear(x, weight, bias)
    assert found.shape == (3, 5)
    torch.testing.assert_close(found, x @ weight.T + bias)
