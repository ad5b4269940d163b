"""Functions of single elements: activations of the feed-forward layers, addition, and factors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.registry import Operator


def xielu(x: Tensor, factors: Tensor) -> Tensor:
    """Return `factors[0] · x²` above 0, `factors[1] · (e^x - 1 - x)` elsewhere, and x / 2 more of both.

    The exponential is that of at most -1e-6. Source: https://arxiv.org/abs/2411.13010.
    """
    wide, (positive, negative) = x.float(), factors.float()
    below = (torch.expm1(wide.clamp(max=-1e-6)) - wide) * negative
    return (torch.where(wide > 0, wide * wide * positive, below) + wide * 0.5).to(x.dtype)


def silu_and_mul(x: Tensor) -> Tensor:
    """Return `silu(gate) * up` [tokens, dim], where x [tokens, 2 · dim] is gate beside up.

    Source: Shazeer, "GLU Variants Improve Transformer", https://arxiv.org/abs/2002.05202.
    """
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """Return `gelu_tanh(gate) * up` [tokens, dim], where x [tokens, 2 · dim] is gate beside up."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def gelu(x: Tensor) -> Tensor:
    """Return `x · Φ(x)`, exact. Source: Hendrycks and Gimpel, https://arxiv.org/abs/1606.08415."""
    return F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU with the tanh approximation of the same paper, as GPT-2 uses it."""
    return F.gelu(x, approximate="tanh")


def relu(x: Tensor) -> Tensor:
    """Return `max(x, 0)`."""
    return F.relu(x)


def relu2(x: Tensor) -> Tensor:
    """Return `max(x, 0)²`. Source: So et al., "Primer", https://arxiv.org/abs/2109.08668."""
    return F.relu(x).square()


def add(x: Tensor, y: Tensor) -> Tensor:
    """Return `x + y`, each [tokens, dim] in one type, rounded once."""
    return x + y


def gated_by_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """Return `x · sigmoid(gate)`, each [tokens, dim] in one type, computed in float32."""
    return (x.float() * torch.sigmoid(gate.float())).to(x.dtype)


def gated_by_softplus(x: Tensor, gate: Tensor) -> Tensor:
    """Return `x · log(1 + e^gate)`, each [tokens, dim] in one type, computed in float32."""
    return (x.float() * F.softplus(gate.float())).to(x.dtype)


def silu_times(gate: Tensor, x: Tensor) -> Tensor:
    """Return `silu(gate) · x`, each [tokens, dim] in one type, computed in float32."""
    return (F.silu(gate.float()) * x.float()).to(x.dtype)


def multiplied(x: Tensor, y: Tensor) -> Tensor:
    """Return `x * y` [tokens, dim] in one type, rounded once; y is [tokens, dim], or [dim] for all tokens."""
    return x * y


def scaled(x: Tensor, factor: float) -> Tensor:
    """Return `x · factor`, rounded once."""
    return x * factor


def widened(x: Tensor, dim: int) -> Tensor:
    """Return [tokens, heads, dim]: x [tokens, heads, at most dim] with zeros behind each head."""
    return F.pad(x, (0, dim - x.shape[2]))


def clamped(x: Tensor, limit: float) -> Tensor:
    """Return x, at most `limit` on either side of 0."""
    return x.clamp(-limit, limit)


def soft_capped(x: Tensor, cap: float) -> Tensor:
    """Return `cap · tanh(x / cap)`, computed in float32."""
    return (torch.tanh(x.float() / cap) * cap).to(x.dtype)


def clamped_swiglu(x: Tensor, alpha: float, limit: float) -> Tensor:
    """Return `gate · sigmoid(alpha · gate) · (up + 1)`, gate at most `limit` and up within it on either side.

    x [tokens, 2 · dim] is gate beside up. Source: https://arxiv.org/abs/2508.10925.
    """
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate * alpha) * (up + 1)


def examples(dtype: torch.dtype) -> Iterator[tuple[Tensor]]:
    """Yield values around zero and where the functions saturate."""
    generator = torch.Generator().manual_seed(0)
    for tokens, width, scale in ((1, 64, 1.0), (5, 48, 12.0)):
        yield ((torch.randn(tokens, width, generator=generator) * scale).to(dtype),)


def add_examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one token and several."""
    for (x,) in examples(dtype):
        yield x, x.flip(0) * 0.5


def multiplied_examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a factor for each element, for each column, and in rows that lie apart."""
    for x, y in add_examples(dtype):
        yield x, y
        yield x, y[0]
        yield x[:, :8], y[:, 8:16]


def parameter_examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, float]]:
    """Yield a parameter with each tensor."""
    for (x,) in examples(dtype):
        yield x, 2.5


def widened_examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, int]]:
    """Yield tokens that lie apart, whose heads become wider, and as wide as they are."""
    for (x,) in examples(dtype):
        heads = x[:, 8:44].view(len(x), 3, 12)
        yield heads, 20
        yield heads, 12


def xielu_examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield two factors with each tensor."""
    for (x,) in examples(dtype):
        yield x, torch.tensor([0.8, 1.3]).to(dtype)


def swiglu_examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, float, float]]:
    """Yield values on both sides of the limit."""
    for (x,) in examples(dtype):
        yield x, 1.7, 3.0


OPERATORS = (
    Operator("silu_and_mul", silu_and_mul, examples),
    Operator("gelu_tanh_and_mul", gelu_tanh_and_mul, examples),
    Operator("gelu", gelu, examples),
    Operator("gelu_tanh", gelu_tanh, examples),
    Operator("relu", relu, examples),
    Operator("relu2", relu2, examples),
    Operator("add", add, add_examples),
    Operator("gated_by_sigmoid", gated_by_sigmoid, add_examples),
    Operator("gated_by_softplus", gated_by_softplus, add_examples),
    Operator("silu_times", silu_times, add_examples),
    Operator("multiplied", multiplied, multiplied_examples),
    Operator("scaled", scaled, parameter_examples),
    Operator("clamped_swiglu", clamped_swiglu, swiglu_examples),
    Operator("xielu", xielu, xielu_examples),
    Operator("widened", widened, widened_examples),
    Operator("clamped", clamped, parameter_examples),
    Operator("soft_capped", soft_capped, parameter_examples),
)
