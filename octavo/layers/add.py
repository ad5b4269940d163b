"""Addition where no norm follows that it could be fused with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from octavo.layers.layer import Binding, Layer


class Add(Layer):
    """`x + y`."""

    def __init__(self) -> None:
        super().__init__()
        self._add: Callable[..., Any]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x and y [tokens, dim] → the same shape."""
        total: Tensor = self._add(x, y)
        return total

    def bind(self, binding: Binding) -> None:
        """Take the operator."""
        self._add = binding.ops.add
