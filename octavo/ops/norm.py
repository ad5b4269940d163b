"""Normalisation, alone and fused with the residual addition before it.

Sources: Zhang and Sennrich, "Root Mean Square Layer Normalization", https://arxiv.org/abs/1910.07467; Ba, Kiros and
Hinton, "Layer Normalization", https://arxiv.org/abs/1607.06450.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.registry import Operator


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Return `x / sqrt(mean(x²) + eps) * (weight + offset)` over the last dimension; x is [..., dim], weight [dim].

    Computed in float32 and rounded once. (Some models are trained with a rounding before the weight as well, which
    differs by one unit in the last place at most, and is further from the formula.)
    """
    if offset:
        return F.rms_norm(x.float(), weight.shape, weight.float() + offset, eps).to(x.dtype)
    # with a weight: torch takes a path without one that is twenty times slower in bfloat16
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return (`rms_norm(x + residual)`, `x + residual`): the norm's input is the new residual stream."""
    residual = residual + x
    return rms_norm(residual, weight, eps, offset), residual


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return `(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over the last dimension.

    x is [tokens, dim] or [tokens, heads, dim]; the weight is [dim], or [heads, dim] with one for each head. Computed in
    float32 and rounded once.
    """
    if weight is None or weight.dim() == 1:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    normed = F.layer_norm(x.float(), x.shape[-1:], None, None, eps) * weight.float()
    return (normed if bias is None else normed + bias.float()).to(x.dtype)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (`layer_norm(x + residual)`, `x + residual`): the norm's input is the new residual stream."""
    residual = residual + x
    return layer_norm(residual, weight, bias, eps), residual


def rms_examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, float, float]]:
    """Yield tokens, heads of tokens, and values small enough for eps to matter, with weights around 1 and around 0."""
    generator = torch.Generator().manual_seed(0)
    for shape, scale in (((1, 64), 1.0), ((5, 96), 30.0), ((3, 4, 16), 1e-3)):
        x = torch.randn(shape, generator=generator) * scale
        weight = torch.rand(shape[-1], generator=generator) + 0.5
        yield x.to(dtype), weight.to(dtype), 1e-5, 0.0
        yield x.to(dtype), (weight - 1.0).to(dtype), 1e-5, 1.0


def layer_examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None, float]]:
    """Yield values with and without weight and bias, and with a mean far from zero."""
    generator = torch.Generator().manual_seed(0)
    for tokens, dim, mean in ((1, 64, 0.0), (5, 48, 3.0)):
        x = (torch.randn(tokens, dim, generator=generator) + mean).to(dtype)
        weight = (torch.rand(dim, generator=generator) + 0.5).to(dtype)
        bias = torch.randn(dim, generator=generator).to(dtype)
        yield x, weight, bias, 1e-5
        yield x, None, None, 1e-5


def head_layer_examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None, float]]:
    """Yield `layer_examples`, and heads that are slices of a wider tensor, with one weight and with one for each."""
    yield from layer_examples(dtype)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 6, 24, generator=generator).to(dtype)[:, :4]
    weight, bias = torch.rand(2, 4, 24, generator=generator).add(0.5).to(dtype)
    yield x, weight, None, 1e-5
    yield x, weight[0], bias[0], 1e-5


def add_rms_examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor, float, float]]:
    """Yield `rms_examples` with a residual stream."""
    for x, weight, eps, offset in rms_examples(dtype):
        yield x, x.flip(0) * 0.5, weight, eps, offset


def add_layer_examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor | None, float]]:
    """Yield `layer_examples` with a residual stream."""
    for x, weight, bias, eps in layer_examples(dtype):
        yield x, x.flip(0) * 0.5, weight, bias, eps


OPERATORS = (
    Operator("rms_norm", rms_norm, rms_examples),
    Operator("add_rms_norm", add_rms_norm, add_rms_examples),
    Operator("layer_norm", layer_norm, head_layer_examples),
    Operator("add_layer_norm", add_layer_norm, add_layer_examples),
)
