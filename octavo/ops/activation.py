"""Activations of the feed-forward layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.registry import Operator


def silu_and_mul(x: Tensor) -> Tensor:
    """`silu(gate) * up` where x [tokens, 2 · dim] is gate beside up; the answer is [tokens, dim].

    Source: Shazeer, "GLU Variants Improve Transformer", https://arxiv.org/abs/2002.05202.
    """
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu(x: Tensor) -> Tensor:
    """`x · Φ(x)`, exact. Source: Hendrycks and Gimpel, https://arxiv.org/abs/1606.08415."""
    return F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU with the tanh approximation of the same paper, as GPT-2 has it."""
    return F.gelu(x, approximate="tanh")


def relu(x: Tensor) -> Tensor:
    """`max(x, 0)`."""
    return F.relu(x)


def examples(dtype: torch.dtype) -> Iterator[tuple[Tensor]]:
    """Values around zero and where the functions saturate."""
    generator = torch.Generator().manual_seed(0)
    for tokens, width, scale in ((1, 64, 1.0), (5, 48, 12.0)):
        yield ((torch.randn(tokens, width, generator=generator) * scale).to(dtype),)


OPERATORS = (
    Operator("silu_and_mul", silu_and_mul, examples),
    Operator("gelu", gelu, examples),
    Operator("gelu_tanh", gelu_tanh, examples),
    Operator("relu", relu, examples),
)
