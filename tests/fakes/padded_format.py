"""A format of weights that costs what compiled ones do: another order, and rows to spare."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from octavo.ops.prepare_linear import LinearShape, PlainLinear, PreparedLinear, TensorSpec
from octavo.ops.registry import Ops, bind

_ROWS = 32


class PaddedLinear(PreparedLinear):
    """Holds the weight in reversed order, behind rows of zeros."""

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        return PlainLinear(self.shape, {**self._state, "weight": self._weight()})(x, add)

    def rows(self, ids: Tensor) -> Tensor:
        return self._weight()[ids]

    def _weight(self) -> Tensor:
        return self._state["packed"][-self.shape.outputs :].flip(0)


class PaddedFormat:
    """See `LinearFormat`. `made` counts the weights it was given."""

    layout = "padded/1"

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> PreparedLinear:
        self.made += 1
        shape = LinearShape(*weight.shape, weight.dtype, bias is not None, gated)
        packed = torch.zeros(self.state_specs(shape)["packed"].shape, dtype=weight.dtype)
        for start in range(0, shape.outputs, _ROWS):
            rows = weight[start : start + _ROWS]
            packed[len(packed) - start - len(rows) : len(packed) - start] = rows.flip(0)
        return self.restore(shape, {"packed": packed} if bias is None else {"packed": packed, "bias": bias.clone()})

    def state_specs(self, shape: LinearShape) -> dict[str, TensorSpec]:
        rows = -(-shape.outputs // _ROWS) * _ROWS
        specs = {"packed": TensorSpec((rows, shape.inputs), shape.dtype)}
        return {**specs, "bias": TensorSpec((shape.outputs,), shape.dtype)} if shape.has_bias else specs

    def restore(self, shape: LinearShape, state: Mapping[str, Tensor]) -> PreparedLinear:
        return PaddedLinear(shape, state)


def padded_ops() -> Ops:
    """The references, but for weights in this format."""
    references = bind()
    functions = {name: value for name, value in vars(references).items() if name != "choices"}
    return Ops({**functions, "prepare_linear": PaddedFormat()}, references.choices)
