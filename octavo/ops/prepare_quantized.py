"""Linear layers that quantise plain weights while loading, into codes without zero points."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops import prepare_linear as plain
from octavo.ops.coded import CodedFormat, CodeSpec
from octavo.ops.codes import SMALLEST, TOLERANCE, check_finite, quantize_rows
from octavo.ops.experts import PreparedStack
from octavo.ops.prepare_linear import LinearFormat, LinearShape, PreparedLinear, TensorSpec
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


class QuantizedFormat(LinearFormat):
    """Makes symmetric codes, which a `CodedFormat` keeps: of 8 bits by the largest magnitude of an output, or of 4 bits
    by the best scale of each group. It is made for a spec of one of these two kinds."""

    def __init__(self, spec: CodeSpec, make_coded: Callable[[CodeSpec], CodedFormat] = CodedFormat) -> None:
        self._coded = make_coded(spec)
        self.spec, self.layout = spec, self._coded.layout

    def state_specs(self, shape: LinearShape) -> dict[str, TensorSpec]:
        """Raise ConfigError for a weight that is too wide."""
        return self._coded.state_specs(shape)

    def restore(self, shape: LinearShape, state: Mapping[str, Tensor]) -> PreparedLinear:
        return self._coded.restore(shape, state)

    def zeros(self, spec: TensorSpec, device: torch.device | str) -> Tensor:
        return self._coded.zeros(spec, device)

    def pack_into(self, state: Mapping[str, Tensor], weight: Tensor, bias: Tensor | None, *, gated: bool) -> None:
        """Raise NotFinite for a weight with NaN or infinities."""
        check_finite(weight)
        if not self.spec.group:
            codes, scales = quantize_rows(weight)
        else:
            outputs, inputs = weight.shape
            groups = F.pad(weight.float(), (0, -inputs % self.spec.group)).view(outputs, -1, self.spec.group)
            codes, scales = quantize_groups(groups)
            codes, scales = codes.view(outputs, -1)[:, :inputs], scales[..., 0]
        self._coded.pack_into(state, {"codes": codes.to(torch.int8), "scales": scales}, bias, gated=gated)

    def restore_stack(self, shape: LinearShape, state: Mapping[str, Tensor], first: int = 0) -> PreparedStack:
        return self._coded.restore_stack(shape, state, first)


INT8: Final = CodeSpec(8, 0)
INT4: Final = CodeSpec(4, 64, "none", torch.bfloat16)
INT4_G128: Final = CodeSpec(4, 128, "none", torch.bfloat16)


def examples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Yield those of plain weights behind each spec."""
    for spec in (INT8, INT4, INT4_G128):
        yield from ((spec, *each) for each in plain.examples(dtype))


def trial(make: Any, spec: CodeSpec, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Return (the product, rows of the weight) of one list of `examples`."""
    made: LinearFormat = make(spec)
    return plain.trial(made, *arguments)


OPERATORS = (Operator("prepare_quantized", QuantizedFormat, examples, TOLERANCE, trial),)
