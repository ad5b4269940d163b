"""Linear layers with 8-bit weights: a scale per output channel, activations quantised token by token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from octavo.ops import prepare_linear as plain
from octavo.ops.codes import SMALLEST, QuantizedLinear, check_finite, check_inputs, divide, exact_product, quantize_rows
from octavo.ops.prepare_linear import LinearShape, ReferenceFormat, TensorSpec
from octavo.ops.registry import Operator

TOLERANCE: Final[Mapping[torch.dtype, float]] = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Integer sums are exact: implementations may differ in the exponential of SiLU, and so in the last place."""


class Int8Linear(QuantizedLinear):
    """State: `codes` int8 [outputs, inputs] in [-127, 127], `scales` float32 [outputs], perhaps `bias`."""

    def values(self, x: Tensor) -> Tensor:
        """Return (Σ codes · codes) · scale of the column · scale of the row."""
        codes, row_scales = quantize_rows(x)
        return exact_product(codes, self._state["codes"]) * self._state["scales"] * row_scales

    def rows(self, ids: Tensor) -> Tensor:
        """Return code · scale for each element of the rows."""
        return (self._state["codes"][ids].float() * self._state["scales"][ids, None]).to(self.shape.dtype)


class Int8Format(ReferenceFormat):
    """Symmetric, by the largest magnitude of each output channel."""

    layout = "int8-rows/1"
    linear_class = Int8Linear

    def pack(self, weight: Tensor) -> dict[str, Tensor]:
        """Raise NotFinite for a weight with NaN or infinities."""
        check_finite(weight)
        values = weight.float()
        largest = values.abs().amax(1, keepdim=True)
        is_used = largest >= SMALLEST
        codes = torch.where(is_used, torch.round(values * divide(127.0, largest)), torch.zeros_like(values))
        scales = torch.where(is_used, largest / 127.0, torch.zeros_like(largest))
        return {"codes": codes.to(torch.int8), "scales": scales[:, 0]}

    def weight_specs(self, shape: LinearShape) -> dict[str, TensorSpec]:
        """Raise ConfigError for a weight that is too wide."""
        check_inputs(shape.inputs)
        return {
            "codes": TensorSpec((shape.outputs, shape.inputs), torch.int8),
            "scales": TensorSpec((shape.outputs,), torch.float32),
        }


OPERATORS = (Operator("prepare_int8", Int8Format(), plain.examples, TOLERANCE, plain.trial),)
