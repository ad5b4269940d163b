"""Rotary position embedding, with the ways in which checkpoints stretch it to longer contexts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.attention.metadata import ModelInput
from octavo.layers.layer import Binding, Layer
from octavo.layers.norm import RMSNorm
from octavo.ops.rotary import rotary_tables


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Slow frequencies are divided by `factor`, fast ones kept, those between blended. Source: Llama 3.1's release."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class Rope:
    """Frequencies `theta ** (-2i / dim)`, divided by `linear_factor` or bent by `llama3`."""

    dim: int
    theta: float
    linear_factor: float = 1.0
    llama3: Llama3Scaling | None = None

    def inverse_frequencies(self, device: torch.device | str = "cpu") -> Tensor:
        """float32 [dim / 2]: radians per position of each pair."""
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32, device=device) / self.dim
        frequencies = 1.0 / (self.theta**exponents) / self.linear_factor
        if self.llama3 is None:
            return frequencies
        scaling = self.llama3
        wavelengths = 2 * math.pi / frequencies
        # 0 where a wave turns less than low_freq_factor times over the original context, 1 above high_freq_factor
        kept = (scaling.original_max_positions / wavelengths - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        kept = kept.clamp(0, 1)
        return (1 - kept) * frequencies / scaling.factor + kept * frequencies


class Rotary(Layer):
    """Rotates queries and keys by their positions, after the per-head norms of the models that have them."""

    def __init__(self, rope: Rope) -> None:
        super().__init__()
        self.rope = rope
        self._rotary: Callable[..., Any]

    def forward(
        self, q: Tensor, k: Tensor, batch: ModelInput, norms: tuple[RMSNorm, RMSNorm] | None = None
    ) -> tuple[Tensor, Tensor]:
        """q [tokens, heads, dim], k [tokens, kv_heads, dim] → the same shapes; `norms` are those of q and k."""
        # every layer of a step turns by the same angles
        cos, sin = batch.attention.once((self.rope, q.dtype), lambda: self._tables(batch.positions, q.dtype))
        if norms is None:
            q, k = self._rotary(q, k, cos, sin)
        else:
            q_norm, k_norm = norms
            q, k = self._rotary(q, k, cos, sin, q_norm.weight, k_norm.weight, q_norm.eps)
        return q, k

    def bind(self, binding: Binding) -> None:
        """Take the operator."""
        self._rotary = binding.ops.rotary

    def _tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return rotary_tables(positions, self.rope.inverse_frequencies(positions.device), dtype)
