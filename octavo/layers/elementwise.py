"""Functions of single elements: activations by the names that checkpoints use, and addition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from torch import Tensor

from octavo.layers.layer import Layer

OPERATOR_OF: Final[Mapping[str, str]] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}
"""Names in config.json, and the operator that computes them."""


class Elementwise(Layer):
    """A function of tensors [tokens, dim] of one shape, which its result has too."""

    def __init__(self, operator: str) -> None:
        super().__init__()
        self._operator = operator

    def forward(self, *tensors: Tensor) -> Tensor:
        """Return the function of tensors [tokens, dim], of the same shape."""
        result: Tensor = getattr(self.ops, self._operator)(*tensors)
        return result


class Factor(Layer):
    """A tensor [tokens, dim] times a number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """Return the product, of the same shape."""
        product: Tensor = self.ops.scaled(x, self.factor)
        return product


def activation(name: str) -> Elementwise:
    """Make the activation that config.json calls `name`, a key of `OPERATOR_OF`."""
    return Elementwise(OPERATOR_OF[name])


def addition() -> Elementwise:
    """Make `x + y`, for places where no norm follows that it could be fused with."""
    return Elementwise("add")
