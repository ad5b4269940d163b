"""Rotary position embedding of queries and keys, with the per-head norms that some models put before it.

Source: Su et al., "RoFormer", https://arxiv.org/abs/2104.09864. Pairs are the two halves of the rotated elements, as
most checkpoints have it, or neighbours, as in the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.ops.norm import rms_norm
from octavo.ops.registry import Operator


def rotary_table(inverse_frequencies: Tensor, num_positions: int, attention_factor: float = 1.0) -> Tensor:
    """Return float32 [num_positions, 2 · frequencies]: the cosines of position · frequency, then the sines.

    `attention_factor` scales both, and so the scores by its square.
    """
    positions = torch.arange(num_positions, dtype=torch.float32, device=inverse_frequencies.device)
    angles = torch.outer(positions, inverse_frequencies)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return table if attention_factor == 1.0 else table.mul_(attention_factor)


def rotary(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    table: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps_and_offset: tuple[float, float] = (0.0, 0.0),
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate q [tokens, heads, dim] and k [tokens, kv_heads, dim] by their positions, int64 [tokens].

    `table` is that of `rotary_table`; where it is narrower than the heads, their last elements stay. With `q_weight`
    and `k_weight` [dim], `rms_norm` with `eps_and_offset` is applied to each head first. Computed in float32 and
    rounded once.
    """
    cos, sin = table[positions].unsqueeze(1).chunk(2, dim=-1)
    eps, offset = eps_and_offset
    norm = partial(rms_norm, eps=eps, offset=offset)
    return _turn(q, cos, sin, q_weight, norm, interleaved), _turn(k, cos, sin, k_weight, norm, interleaved)


class Rotation(NamedTuple):
    """What rotates queries and keys: the arguments of `rotary` behind them, and a table of queries alone."""

    positions: Tensor
    q_table: Tensor
    k_table: Tensor
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    eps_and_offset: tuple[float, float] = (0.0, 0.0)
    interleaved: bool = False

    def of(self, rotary: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return q [tokens, heads, dim] and k [tokens, kv_heads, dim] rotated by an implementation of `rotary`."""
        positions, q_table, k_table, *rest = self
        if q_table is k_table:
            return rotary(q, k, positions, k_table, *rest)
        return rotary(q, k[:, :0], positions, q_table, *rest)[0], rotary(q[:, :0], k, positions, k_table, *rest)[1]


def _turn(
    x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, norm: Callable[..., Tensor], interleaved: bool
) -> Tensor:
    """Rotate x [tokens, heads, dim] by cos and sin [tokens, 1, rotated / 2]; `norm(x, weight)` of it first."""
    values = x.float() if weight is None else norm(x.float(), weight.float())
    half = cos.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    )
    one, other = values[..., first], values[..., second]
    out[..., first] = torch.addcmul(one * cos, other, sin, value=-1)
    out[..., second] = torch.addcmul(other * cos, one, sin)
    out[..., 2 * half :] = values[..., 2 * half :]
    return out


def examples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Yield near and far positions, with and without norms, both kinds of pairs; heads are slices of a wider tensor."""
    generator = torch.Generator().manual_seed(0)
    for positions, heads, kv_heads, dim, rotated in (([0], 4, 2, 16, 16), ([5, 0, 4000, 131_071], 3, 1, 64, 24)):
        table = rotary_table(10_000.0 ** -(torch.arange(0, rotated, 2) / rotated), max(positions) + 1)
        qkv = torch.randn(len(positions), heads + 2 * kv_heads, dim, generator=generator).to(dtype)
        q, k, _ = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        q_weight, k_weight = (torch.rand(2, dim, generator=generator) + 0.5).to(dtype)
        for interleaved in (False, True):
            yield q, k, torch.tensor(positions), table, None, None, (0.0, 0.0), interleaved
            for offset in (0.0, 1.0):
                yield q, k, torch.tensor(positions), table, q_weight, k_weight, (1e-6, offset), interleaved


def table_examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, int, float]]:
    """Yield few positions and many, fast and slow frequencies. A table is float32 for every type of model."""
    for pairs, num_positions, attention_factor in ((1, 3, 1.0), (20, 140_000, 1.25)):
        yield 10_000.0 ** -(torch.arange(pairs) / pairs), num_positions, attention_factor


OPERATORS = (
    Operator("rotary", rotary, examples),
    Operator(
        "rotary_table",
        rotary_table,
        table_examples,
        dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), 1e-6),
    ),
)
