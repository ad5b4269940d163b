"""Linear layers with 4-bit weights in groups along their inputs, activations of 8 bits quantised token by token."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops import prepare_linear as plain
from octavo.ops.codes import SMALLEST, QuantizedLinear, check_finite, check_inputs, quantize_rows
from octavo.ops.prepare_int8 import TOLERANCE
from octavo.ops.prepare_linear import LinearShape, ReferenceFormat, TensorSpec
from octavo.ops.registry import Operator

DIVISORS: Final = (8.0, 7.5, 8.5, 9.0, 10.0)
"""A group's scale is its extreme value over minus one of these: the one with the least squared error is kept.

8 takes the extreme value to the end of the codes, which reach from -8 to 7; more clips it."""

_LANES = 16


def quantize_groups(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for values float32 [..., group], codes int8 in [-8, 7], and scales bfloat16 [..., 1]."""
    most, least = values.amax(-1, keepdim=True), values.amin(-1, keepdim=True)
    extreme = torch.where(most >= -least, most, least)
    is_used = extreme.abs() >= SMALLEST
    best_scale = torch.zeros_like(extreme)
    best_error = torch.full_like(extreme, float("inf"))
    for divisor in DIVISORS:
        scale = (extreme / -divisor).bfloat16().float()
        error = _squared_error(values, scale)
        better = is_used & ((error < best_error) | (best_scale == 0))
        best_scale = torch.where(better, scale, best_scale)
        best_error = torch.where(better, error, best_error)
    codes = torch.where(is_used, _codes(values, best_scale), torch.zeros_like(values))
    return codes.to(torch.int8), best_scale.bfloat16()


def _codes(values: Tensor, scale: Tensor) -> Tensor:
    return torch.round(values * (1.0 / scale)).clamp(-8, 7)


def _squared_error(values: Tensor, scale: Tensor) -> Tensor:
    """Σ (code · scale - value)² in the order of vectors of sixteen lanes, halves added to halves in the end."""
    error = _codes(values, scale) * scale - values
    slices = (error * error).view(*values.shape[:-1], -1, _LANES)
    total = torch.zeros_like(slices[..., 0, :])
    for i in range(slices.shape[-2]):
        total = total + slices[..., i, :]
    while total.shape[-1] > 1:
        low, high = total.chunk(2, dim=-1)
        total = low + high
    return total


class Int4Linear(QuantizedLinear):
    """State: `codes` int8 [outputs, groups, group] in [-8, 7], `scales` bfloat16 [outputs, groups], perhaps `bias`."""

    def values(self, x: Tensor) -> Tensor:
        """Return (Σ over groups, in order, of Σ codes · codes · scale) · scale of the row."""
        codes, row_scales = quantize_rows(x)
        weights, scales = self._state["codes"], self._state["scales"]
        _, num_groups, group = weights.shape
        codes = F.pad(codes, (0, num_groups * group - self.shape.inputs))
        total = codes.new_zeros((x.shape[0], self.shape.outputs))
        for g in range(num_groups):
            # at most 128 · 127 · 8: float32 holds every partial sum
            sums = F.linear(codes[:, g * group : (g + 1) * group], weights[:, g].float())
            total = total + sums * scales[:, g].float()
        return total * row_scales

    def rows(self, ids: Tensor) -> Tensor:
        """Return code · scale for each element of the rows."""
        values = self._state["codes"][ids].float() * self._state["scales"][ids, :, None].float()
        return values.flatten(1)[:, : self.shape.inputs].to(self.shape.dtype)


class Int4Format(ReferenceFormat):
    """Symmetric groups of `group` inputs; the reference keeps a code in a byte."""

    linear_class = Int4Linear

    def __init__(self, group: int) -> None:
        self.group = group
        self.layout = f"int4-g{group}-rows/1"

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        """Raise NotFinite for a weight with NaN or infinities."""
        check_finite(weight)
        outputs, inputs = weight.shape
        groups = F.pad(weight.float(), (0, -inputs % self.group)).view(outputs, -1, self.group)
        codes, scales = quantize_groups(groups)
        return {"codes": codes, "scales": scales[..., 0]}

    def weight_specs(self, shape: LinearShape) -> dict[str, TensorSpec]:
        """Raise ConfigError for a weight that is too wide."""
        check_inputs(shape.inputs)
        groups = -(-shape.inputs // self.group)
        return {
            "codes": TensorSpec((shape.outputs, groups, self.group), torch.int8),
            "scales": TensorSpec((shape.outputs, groups), torch.bfloat16),
        }


OPERATORS = (
    Operator("prepare_int4", Int4Format(64), plain.examples, TOLERANCE, plain.trial),
    Operator("prepare_int4_g128", Int4Format(128), plain.examples, TOLERANCE, plain.trial),
)
