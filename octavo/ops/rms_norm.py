"""Root-mean-square normalisation, alone and fused with the residual addition before it.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", https://arxiv.org/abs/1910.07467.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.registry import Operator


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x²) + eps) * weight` over the last dimension; x is [..., dim], weight [dim].

    Computed in float32 and rounded once. (Some models are trained with a rounding before the weight as well, which
    differs by one unit in the last place at most, and is further from the formula.)
    """
    # with a weight: torch takes a path without one that is twenty times slower in bfloat16
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(`rms_norm(x + residual)`, `x + residual`): the norm's input is the new residual stream."""
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


def examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Tokens, heads of tokens, and values small enough for eps to matter."""
    generator = torch.Generator().manual_seed(0)
    for shape, scale in (((1, 64), 1.0), ((5, 96), 30.0), ((3, 4, 16), 1e-3)):
        x = torch.randn(shape, generator=generator) * scale
        weight = torch.rand(shape[-1], generator=generator) + 0.5
        yield x.to(dtype), weight.to(dtype), 1e-5


def add_examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor, float]]:
    """The same with a residual stream."""
    for x, weight, eps in examples(dtype):
        yield x, x.flip(0) * 0.5, weight, eps


OPERATORS = (Operator("rms_norm", rms_norm, examples), Operator("add_rms_norm", add_rms_norm, add_examples))
