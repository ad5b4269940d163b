"""Activations by the names that checkpoints use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from torch import Tensor

from octavo.layers.layer import Binding, Layer

OPERATOR_OF: Final[Mapping[str, str]] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Names in config.json, and the operator that computes them."""


class Activation(Layer):
    """An element-wise function, by its name in config.json (a key of `OPERATOR_OF`)."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.operator = OPERATOR_OF[name]
        self._function: Callable[..., Any]

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, dim] → the same shape."""
        activated: Tensor = self._function(x)
        return activated

    def bind(self, binding: Binding) -> None:
        """Take the operator."""
        self._function = getattr(binding.ops, self.operator)
