"""The protocol of weight formats, and those that are made at load from checkpoints that are not quantised."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from octavo.ops.prepare_linear import LinearFormat, PreparedLinear
from octavo.ops.registry import Ops


class WeightMethod(Protocol):
    """How a linear layer, or a head, keeps its weight. One object serves many layers and holds no state of any."""

    name: str

    def make(self, layer: nn.Module, inputs: int, outputs: int, bias: bool) -> None:
        """Give `layer` its parameters, as the checkpoint fills them; dimension 0 of each counts outputs."""
        ...

    def format(self, ops: Ops) -> LinearFormat:
        """Return the format that `finish` brings the parameters into."""
        ...

    def finish(self, layer: nn.Module, ops: Ops, *, gated: bool = False) -> PreparedLinear:
        """Bring the filled parameters into the form that computes best, in memory of its own; the layer releases them.

        It is called once for a layer, as soon as it is filled. Parameters may be views of a mapped file.
        """
        ...


class FromPlain:
    """A method whose layers are filled with plain `weight` [outputs, inputs] and perhaps `bias` [outputs].

    `operator` names the `LinearFormat` that they are brought into.
    """

    def __init__(self, name: str, operator: str) -> None:
        self.name = name
        self._operator = operator

    def make(self, layer: nn.Module, inputs: int, outputs: int, bias: bool) -> None:
        layer.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        layer.register_parameter("bias", nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None)

    def format(self, ops: Ops) -> LinearFormat:
        found: LinearFormat = getattr(ops, self._operator)
        return found

    def finish(self, layer: nn.Module, ops: Ops, *, gated: bool = False) -> PreparedLinear:
        bias = None if layer.bias is None else layer.get_parameter("bias").data
        return self.format(ops)(layer.get_parameter("weight").data, bias, gated=gated)


UNQUANTIZED = FromPlain("unquantized", "prepare_linear")
"""Weights are multiplied in their own type."""
