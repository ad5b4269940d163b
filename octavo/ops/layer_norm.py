"""Layer normalisation, alone and fused with the residual addition before it.

Source: Ba, Kiros and Hinton, "Layer Normalization", https://arxiv.org/abs/1607.06450.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.registry import Operator


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over the last dimension; x is [tokens, dim]."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(`layer_norm(x + residual)`, `x + residual`): the norm's input is the new residual stream."""
    residual = residual + x
    return layer_norm(residual, weight, bias, eps), residual


def examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None, float]]:
    """With and without weight and bias, and a mean far from zero."""
    generator = torch.Generator().manual_seed(0)
    for tokens, dim, mean in ((1, 64, 0.0), (5, 48, 3.0)):
        x = (torch.randn(tokens, dim, generator=generator) + mean).to(dtype)
        weight = (torch.rand(dim, generator=generator) + 0.5).to(dtype)
        bias = torch.randn(dim, generator=generator).to(dtype)
        yield x, weight, bias, 1e-5
        yield x, None, None, 1e-5


def add_examples(
    dtype: torch.dtype,
) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor | None, float]]:
    """The same with a residual stream."""
    for x, weight, bias, eps in examples(dtype):
        yield x, x.flip(0) * 0.5, weight, bias, eps


OPERATORS = (Operator("layer_norm", layer_norm, examples), Operator("add_layer_norm", add_layer_norm, add_examples))
