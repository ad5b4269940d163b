"""One weight of every expert of a layer, while it is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.ops.experts import PreparedStack
from octavo.ops.prepare_linear import LinearShape, TensorSpec
from octavo.ops.registry import Ops
from octavo.quantization.method import UNQUANTIZED, WeightMethod


@dataclass(frozen=True, slots=True)
class StackedWeight:
    """One of the two weights of all experts."""

    name: str
    """Its name where transformers stacks it."""
    inputs: int
    outputs: int
    own_outputs: int
    """Outputs of this rank."""
    first: int
    """The first expert of this rank, and how many it has."""
    count: int
    experts: int


class ExpertStack:
    """One weight of every expert: each is packed as soon as all of its pieces have arrived."""

    def __init__(
        self, name: str, outputs: int, inputs: int, pieces: tuple[str, ...], *, bias: bool, gated: bool
    ) -> None:
        """pieces: names of the matrices whose rows the weight has."""
        self.name, self.pieces = name, pieces
        self.outputs, self.inputs, self.bias, self.gated = outputs, inputs, bias, gated
        self.method: WeightMethod = UNQUANTIZED
        self._state: dict[str, Tensor] = {}
        self._arrived: dict[int, dict[tuple[str, str], Tensor]] = {}

    def shape(self, dtype: torch.dtype) -> LinearShape:
        """Return the shape of each weight."""
        return LinearShape(self.outputs, self.inputs, dtype, self.bias, self.gated)

    def tensors(self, outputs: int) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
        """Return the tensors of a matrix with so many outputs, by the suffix of their names in the checkpoint: shape,
        and type where it is not a plain weight's."""
        specs = self.method.tensors(LinearShape(outputs, self.inputs, torch.float32))
        return {name: (spec.shape, None if name == "weight" else spec.dtype) for name, spec in specs.items()}

    def state_specs(self, ops: Ops, dtype: torch.dtype, experts: int) -> dict[str, TensorSpec]:
        """Return the tensors that `experts` packed weights take."""
        specs = self.method.format(ops).state_specs(self.shape(dtype))
        return {name: TensorSpec((experts, *spec.shape), spec.dtype) for name, spec in specs.items()}

    def begin(self, ops: Ops, dtype: torch.dtype, experts: int, device: torch.device | str) -> None:
        """Take memory for `experts` weights."""
        self._format, self._dtype = self.method.format(ops), dtype
        specs = self.state_specs(ops, dtype, experts)
        self._state = {name: self._format.zeros(spec, device) for name, spec in specs.items()}

    @property
    def has_begun(self) -> bool:
        """Whether there is memory for the weights."""
        return bool(self._state)

    def take(self, expert: int, piece: str, tensor: str, stored: Tensor) -> None:
        """Keep a tensor of a piece until all are there. Raises NotFinite and CheckpointError."""
        arrived, names = self._arrived.setdefault(expert, {}), list(self.tensors(self.outputs))
        arrived[piece, tensor] = stored
        if len(arrived) < len(self.pieces) * (len(names) + self.bias):
            return
        del self._arrived[expert]

        def joined(name: str) -> Tensor:
            first, *more = (arrived[each, name] for each in self.pieces)
            if name != "order":
                return torch.cat((first, *more)) if more else first.contiguous()
            if any(not torch.equal(first, each) for each in more):
                raise CheckpointError(f"gate and up of expert {expert} have different g_idx, expected the same")
            return first

        weight = {name: joined(name).to(self._dtype) if name == "weight" else joined(name) for name in names}
        bias = joined("bias").to(self._dtype) if self.bias else None
        own = {name: tensor[expert] for name, tensor in self._state.items()}
        self._format.pack_into(own, self.method.source(weight), bias, gated=self.gated)

    def finish(self, first: int) -> PreparedStack:
        """Return the weights, ready to be multiplied."""
        assert not self._arrived, f"experts {list(self._arrived)} lack pieces"
        state, self._state = self._state, {}
        return self._format.restore_stack(self.shape(self._dtype), state, first)
