"""Linear layers with 8-bit weights: a scale per output channel, activations quantised token by token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from octavo.ops import prepare_linear as plain
from octavo.ops.codes import SMALLEST, check_finite, check_inputs, divide, exact_product, finish, quantize_rows
from octavo.ops.prepare_linear import LinearShape, PreparedLinear, TensorSpec
from octavo.ops.registry import Operator

TOLERANCE: Final[Mapping[torch.dtype, float]] = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Integer sums are exact: implementations may differ in the exponential of SiLU, and so in the last place."""


class Int8Linear(PreparedLinear):
    """Codes [outputs, inputs] in [-127, 127] and a scale for each row."""

    def __init__(self, shape: LinearShape, codes: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        self.shape = shape
        self._codes, self._scales, self._bias = codes, scales, bias

    def __call__(self, x: Tensor) -> Tensor:
        """See `PreparedLinear`: (Σ codes · codes) · scale of the row · scale of the column + bias."""
        return finish(self._values(x), self._bias, self.shape, self.shape.dtype)

    def in_float32(self, x: Tensor) -> Tensor:
        """See `PreparedLinear.in_float32`."""
        return finish(self._values(x), self._bias, self.shape, torch.float32)

    def _values(self, x: Tensor) -> Tensor:
        codes, row_scales = quantize_rows(x)
        return exact_product(codes, self._codes) * row_scales * self._scales

    def rows(self, ids: Tensor) -> Tensor:
        """See `PreparedLinear.rows`: code · scale."""
        return (self._codes[ids].float() * self._scales[ids, None]).to(self.shape.dtype)

    def state(self) -> dict[str, Tensor]:
        """`codes` int8 [outputs, inputs], `scales` float32 [outputs], and `bias` [outputs] where there is one."""
        state = {"codes": self._codes, "scales": self._scales}
        return state if self._bias is None else {**state, "bias": self._bias}


class Int8Format:
    """Symmetric, by the largest magnitude of each output channel. See `LinearFormat`."""

    layout = "int8-rows/1"

    def __call__(self, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> PreparedLinear:
        """See `LinearFormat`. Raises NotFinite."""
        outputs, inputs = weight.shape
        check_finite(weight)
        values = weight.float()
        largest = values.abs().amax(1, keepdim=True)
        is_used = largest >= SMALLEST
        codes = torch.where(is_used, torch.round(values * divide(127.0, largest)), torch.zeros_like(values))
        scales = torch.where(is_used, largest / 127.0, torch.zeros_like(largest))
        shape = LinearShape(outputs, inputs, weight.dtype, bias is not None, gated)
        return Int8Linear(shape, codes.to(torch.int8), scales[:, 0], None if bias is None else bias.clone())

    def state_specs(self, shape: LinearShape) -> dict[str, TensorSpec]:
        """See `LinearFormat.state_specs`. Raises ConfigError for a weight that is too wide."""
        check_inputs(shape.inputs)
        specs = {
            "codes": TensorSpec((shape.outputs, shape.inputs), torch.int8),
            "scales": TensorSpec((shape.outputs,), torch.float32),
        }
        return {**specs, "bias": TensorSpec((shape.outputs,), shape.dtype)} if shape.has_bias else specs

    def restore(self, shape: LinearShape, state: Mapping[str, Tensor]) -> PreparedLinear:
        """See `LinearFormat.restore`."""
        return Int8Linear(shape, state["codes"], state["scales"], state.get("bias"))


OPERATORS = (Operator("prepare_int8", Int8Format(), plain.examples, TOLERANCE, plain.trial),)
