"""The protocol of weight formats, and those that are made at load from checkpoints that are not quantised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from octavo.ops.prepare_linear import LinearFormat, LinearShape, PreparedLinear, TensorSpec
from octavo.ops.registry import Ops


class WeightMethod(Protocol):
    """How a linear layer, or a head, keeps its weight. One object serves many layers and holds no state of any.

    `shape` is that of the plain weight, for quantised ones too.
    """

    name: str

    def make(self, layer: nn.Module, inputs: int, outputs: int, bias: bool) -> None:
        """Give `layer` its parameters, as the checkpoint fills them; dimension 0 of each counts outputs."""
        ...

    def finish(self, layer: nn.Module, ops: Ops, *, gated: bool = False) -> PreparedLinear:
        """Bring the filled parameters into the form that computes best, in memory of its own; the layer releases them.

        Called once for a layer, as soon as it is filled. Parameters may be views of a mapped file.
        """
        ...

    def layout(self, ops: Ops) -> str:
        """Names the bytes that `finish` makes of given parameters; see `LinearFormat.layout`."""
        ...

    def state_specs(self, shape: LinearShape, ops: Ops) -> dict[str, TensorSpec]:
        """What `finish` will keep of a weight of this shape; see `LinearFormat.state_specs`."""
        ...

    def restore(self, shape: LinearShape, ops: Ops, state: Mapping[str, Tensor]) -> PreparedLinear:
        """What `finish` made, from its state; see `LinearFormat.restore`."""
        ...


class FromPlain:
    """A method whose layers are filled with plain `weight` [outputs, inputs] and perhaps `bias` [outputs].

    `operator` names the `LinearFormat` that they are brought into as soon as they are there.
    """

    def __init__(self, name: str, operator: str) -> None:
        self.name = name
        self._operator = operator

    def make(self, layer: nn.Module, inputs: int, outputs: int, bias: bool) -> None:
        """See `WeightMethod.make`."""
        layer.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        layer.register_parameter("bias", nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None)

    def finish(self, layer: nn.Module, ops: Ops, *, gated: bool = False) -> PreparedLinear:
        """See `WeightMethod.finish`."""
        bias = None if layer.bias is None else layer.get_parameter("bias").data
        return self._format(ops)(layer.get_parameter("weight").data, bias, gated=gated)

    def layout(self, ops: Ops) -> str:
        """See `WeightMethod.layout`."""
        return self._format(ops).layout

    def state_specs(self, shape: LinearShape, ops: Ops) -> dict[str, TensorSpec]:
        """See `WeightMethod.state_specs`."""
        return self._format(ops).state_specs(shape)

    def restore(self, shape: LinearShape, ops: Ops, state: Mapping[str, Tensor]) -> PreparedLinear:
        """See `WeightMethod.restore`."""
        return self._format(ops).restore(shape, state)

    def _format(self, ops: Ops) -> LinearFormat:
        found: LinearFormat = getattr(ops, self._operator)
        return found


class Unquantized(FromPlain):
    """Weights are multiplied in their own type."""

    def __init__(self) -> None:
        super().__init__("unquantized", "prepare_linear")
