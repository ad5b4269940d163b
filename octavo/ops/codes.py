"""Numbers as small integers and scales: the arithmetic that quantised linear layers share, in plain torch.

All of it is done in float32 and rounded as it is written, so that compiled kernels can follow it bit by bit.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.errors import CheckpointError, ConfigError
from octavo.ops.elementwise import silu_and_mul
from octavo.ops.prepare_linear import PreparedLinear

TOLERANCE: Final[Mapping[torch.dtype, float]] = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Integer sums are exact: implementations may differ in the exponential of SiLU, and so in the last place."""

SMALLEST: Final = 1e-30
"""Smaller magnitudes count as zero: 127 divided by one of them would leave the range of float32."""

MOST_INPUTS: Final = 1 << 16
"""The sum of this many products of 8-bit codes fits 32 bits."""

_EXACT_INPUTS: Final = 1024
"""The sum of this many products of 8-bit codes is less than 2²⁴: float32 holds every partial sum."""


class NotFinite(CheckpointError):
    """A plain weight holds NaN or an infinity, in row `row`."""

    def __init__(self, row: int) -> None:
        super().__init__(f"row {row} of a weight holds a value that is not finite")
        self.row = row


def check_inputs(inputs: int) -> None:
    """Refuse a weight whose integer sums would not fit. Raises ConfigError."""
    if inputs > MOST_INPUTS:
        raise ConfigError(
            f"a weight with {inputs:,} inputs cannot be quantised, {MOST_INPUTS:,} are the most; leave quantization out"
        )


def check_finite(weight: Tensor) -> None:
    """Raise NotFinite with the first row of `weight` [outputs, inputs] that holds NaN or an infinity."""
    spoilt = (~weight.isfinite()).any(1)
    if spoilt.any():
        raise NotFinite(int(spoilt.nonzero()[0]))


def divide(numerator: float, denominator: Tensor) -> Tensor:
    """Return the quotient rounded once; `numerator / denominator` would multiply with a rounded reciprocal."""
    return torch.full_like(denominator, numerator) / denominator


def quantize_rows(x: Tensor, most: float = 127.0) -> tuple[Tensor, Tensor]:
    """x [rows, inputs] → codes [rows, inputs], whole numbers from -most to most, and scales [rows, 1], in float32.

    Symmetric, by the largest magnitude of each row. The scale of a row that is not finite is NaN.
    """
    x = x.float()
    largest = x.abs().amax(1, keepdim=True)
    is_finite = largest.isfinite()
    is_used = is_finite & (largest >= SMALLEST)
    codes = torch.round(x * divide(most, largest))
    codes = torch.where(is_used, codes, torch.zeros_like(codes))
    scales = torch.where(is_used, largest / most, torch.zeros_like(largest))
    return codes, torch.where(is_finite, scales, torch.full_like(largest, float("nan")))


def exact_product(codes: Tensor, weights: Tensor) -> Tensor:
    """Return Σ codes [rows, inputs] · weights [outputs, inputs], rounded to float32 once: float32 [rows, outputs]."""
    total = codes.new_zeros((codes.shape[0], weights.shape[0]), dtype=torch.float64)
    for start in range(0, codes.shape[1], _EXACT_INPUTS):
        end = start + _EXACT_INPUTS
        total += F.linear(codes[:, start:end], weights[:, start:end].float())
    return total.float()


class QuantizedLinear(PreparedLinear):
    """A product that is computed in float32 from codes, and rounded once."""

    @abstractmethod
    def values(self, x: Tensor) -> Tensor:
        """x [tokens, inputs] → the product without bias, float32 [tokens, outputs]."""

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        return self._finish(self.values(x), add).to(self.shape.dtype)

    def in_float32(self, x: Tensor) -> Tensor:
        return self._finish(self.values(x), None)

    def _finish(self, values: Tensor, add: Tensor | None) -> Tensor:
        if "bias" in self._state:
            values = values + self._state["bias"].float()
        if add is not None:
            values = values + add
        return silu_and_mul(values) if self.shape.is_gated else values
