"""Rotary position embedding of queries and keys, with the per-head norms that some models put before it.

Source: Su et al., "RoFormer", https://arxiv.org/abs/2104.09864, in the layout that rotates halves of a head.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from octavo.ops.registry import Operator
from octavo.ops.rms_norm import rms_norm


def rotary_tables(positions: Tensor, inverse_frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [tokens, 1, dim], of the angles position · frequency; computed in float32.

    The first half of `sin` is negated, so that a rotation is `x * cos + swap_halves(x) * sin`.
    """
    angles = torch.outer(positions.to(torch.float32), inverse_frequencies)
    sin = angles.sin()
    return (
        angles.cos().repeat(1, 2).unsqueeze(1).to(dtype),
        torch.cat((-sin, sin), dim=-1).unsqueeze(1).to(dtype),
    )


def rotary(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Rotate q [tokens, heads, dim] and k [tokens, kv_heads, dim] by the tables of `rotary_tables`.

    With `q_weight` and `k_weight` [dim], each head goes through `rms_norm` first.
    """
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    half = q.shape[-1] // 2
    return (
        torch.addcmul(q * cos, torch.roll(q, half, -1), sin),
        torch.addcmul(k * cos, torch.roll(k, half, -1), sin),
    )


def examples(
    dtype: torch.dtype,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, float]]:
    """Near and far positions; heads that are slices of a wider tensor; with and without norms."""
    generator = torch.Generator().manual_seed(0)
    for positions, heads, kv_heads, dim in (([0], 4, 2, 16), ([5, 0, 4000, 131_071], 3, 1, 64)):
        frequencies = 10_000.0 ** -(torch.arange(0, dim, 2) / dim)
        cos, sin = rotary_tables(torch.tensor(positions), frequencies, dtype)
        qkv = torch.randn(len(positions), heads + 2 * kv_heads, dim, generator=generator).to(dtype)
        q, k, _ = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        q_weight, k_weight = (torch.rand(2, dim, generator=generator) + 0.5).to(dtype)
        yield q, k, cos, sin, None, None, 0.0
        yield q, k, cos, sin, q_weight, k_weight, 1e-6


OPERATORS = (Operator("rotary", rotary, examples),)
