"""The protocol of weight formats, and the format of checkpoints that are not quantised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from octavo.ops.registry import Ops


class WeightMethod(Protocol):
    """How a linear layer keeps its weight. One object serves many layers and holds no state of any."""

    name: str

    def make(self, layer: nn.Module, inputs: int, outputs: int, bias: bool) -> None:
        """Give `layer` its parameters, as the checkpoint fills them; dimension 0 of each counts outputs."""
        ...

    def finish(self, layer: nn.Module, ops: Ops) -> Callable[[Tensor], Tensor]:
        """Bring the filled parameters into the form that computes best; answers x [tokens, inputs] → [tokens, outputs].

        Called once after loading, and again whenever the parameters were replaced.
        """
        ...


class Unquantized:
    """`weight` [outputs, inputs] and perhaps `bias` [outputs], multiplied as they are."""

    name = "unquantized"

    def make(self, layer: nn.Module, inputs: int, outputs: int, bias: bool) -> None:
        """See `WeightMethod.make`."""
        layer.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        layer.register_parameter("bias", nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None)

    def finish(self, layer: nn.Module, ops: Ops) -> Callable[[Tensor], Tensor]:
        """See `WeightMethod.finish`."""
        linear, weight, bias = ops.linear, layer.weight, layer.bias

        def apply(x: Tensor) -> Tensor:
            product: Tensor = linear(x, weight, bias)
            return product

        return apply
