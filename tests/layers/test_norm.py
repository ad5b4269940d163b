"""Norms beside the residual stream."""

from __future__ import annotations

import pytest
import torch

from octavo.layers.norm import LayerNorm, RMSNorm
from tests.layers.bound import fill, random


@pytest.mark.parametrize("make", [RMSNorm, LayerNorm])
def test_add_normalises_the_new_residual(make: type[RMSNorm] | type[LayerNorm]) -> None:
    norm = fill(make(8, 1e-5), {"layers.0.part.weight": random(8), "layers.0.part.bias": random(8)})
    x, residual = random(3, 8), random(3, 8) * 2
    normed, stream = norm.add(x, residual)
    torch.testing.assert_close(stream, x + residual)
    torch.testing.assert_close(normed, norm(x + residual))


@pytest.mark.parametrize("make", [RMSNorm, LayerNorm])
def test_without_a_residual_x_starts_the_stream(make: type[RMSNorm] | type[LayerNorm]) -> None:
    norm = fill(make(8, 1e-5), {"layers.0.part.weight": random(8), "layers.0.part.bias": random(8)})
    x = random(3, 8)
    normed, stream = norm.add(x, None)
    assert stream is x
    torch.testing.assert_close(normed, norm(x))
