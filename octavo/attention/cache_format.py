"""How the KV cache holds numbers: as they are, or in 8 bits with a scale per token and head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

CACHE_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
"""Type of the values by the name in the configuration."""

_LARGEST: Final[Mapping[torch.dtype, float]] = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def is_quantized(dtype: torch.dtype) -> bool:
    """Whether values of this type need scales beside them."""
    return dtype in _LARGEST


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return codes of `dtype` [..., dim] and float32 scales [..., 1], so that x is about codes * scales.

    The scale takes the largest value of a row to the largest code. That of a row that is not finite is NaN, so that
    reading it gives NaN.
    """
    x = x.float()
    amplitude = x.abs().amax(dim=-1, keepdim=True)
    # a number divided by a tensor would be multiplied with its rounded reciprocal
    factor = torch.where(amplitude > 0, amplitude.new_tensor(_LARGEST[dtype]) / amplitude, 0.0)
    scaled = (x * factor).nan_to_num(0.0)
    codes = scaled.round() if dtype is torch.int8 else scaled
    scale = amplitude / _LARGEST[dtype] + (x * 0).sum(dim=-1, keepdim=True)
    return codes.to(dtype), scale


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return codes * scales in float32, then as `dtype`."""
    return (codes.float() * scales).to(dtype)
