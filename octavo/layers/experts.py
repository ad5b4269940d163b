"""Mixtures of experts: the router, and the experts' weights, shared by the ranks of a mesh.

The ranks share the width of every expert, or whole experts where the mesh has an `expert` axis. Each output is summed
up by one rank in either case: the same bits on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError
from octavo.layers.elementwise import GATED, OPERATOR_OF
from octavo.layers.expert_stack import ExpertStack, StackedWeight
from octavo.layers.layer import Binding, Layer, TensorSlot
from octavo.ops.codes import NotFinite
from octavo.ops.experts import PreparedStack, Routing
from octavo.ops.prepare_linear import LinearFormat, PreparedLinear, TensorSpec
from octavo.ops.registry import Ops
from octavo.quantization.method import Coded, Methods


class WeightedInputs(Layer):
    """Weighs the inputs of experts in the place of their outputs, where a token takes one of them."""

    def forward(self, x: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
        """Return x [tokens, inputs] times the weights, and a routing whose weights are 1."""
        x, ones = self.ops.weighted_inputs(x, routing.weights)
        return x, routing._replace(weights=ones)


class OutputBias(Layer):
    """Adds a stored vector."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, width] → [tokens, width]."""
        return x + self.bias


class IdleExperts(Layer):
    """Adds the outputs of experts that return their inputs; their numbers follow those of the others."""

    def __init__(self, experts: int) -> None:
        """experts: how many the others are."""
        super().__init__()
        self._experts = experts

    def forward(self, out: Tensor, x: Tensor, routing: Routing) -> Tensor:
        """out [tokens, inputs], the sum of the others, and x, their input → the sum of all."""
        return self.ops.add_inputs(out, x, routing, self._experts)


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """How a checkpoint stores the weights of experts: one tensor for each, `experts.0.gate_proj.weight`, or stacked.

    Stacked are `experts.gate_up_proj` [experts, 2 · width, inputs] and `experts.down_proj` [experts, inputs, width],
    and with `_bias` behind these names [experts, outputs].
    """

    gate: str | None = "gate_proj"
    """None where experts have no gate."""
    up: str = "up_proj"
    down: str = "down_proj"
    is_stacked: bool = False
    is_transposed: bool = False
    """Stacked tensors are [experts, inputs, outputs]."""
    is_interleaved: bool = False
    """Rows of gate and up alternate in stacked tensors."""
    stacks: tuple[str, str] | None = None
    """Names of the stacked tensors where they differ from those above."""
    is_apart: bool = False
    """Gates, ups and downs are a stack each, with `.weight` behind the names above."""
    is_flat: bool = False
    """These are [experts · width, inputs] each, under the names alone."""


class Experts(Layer):
    """down(act(gate(x)) · up(x)) of every expert that a token takes, and their weighted sum.

    `activation` is that of a `GatedLinear`, with its `numbers`; without a gate, a key of `OPERATOR_OF`.
    """

    def __init__(
        self,
        inputs: int,
        width: int,
        experts: int,
        mesh: Mesh,
        *,
        stored: StoredExperts,
        bias: bool = False,
        activation: str = "silu",
        numbers: tuple[float, ...] = (),
    ) -> None:
        super().__init__()
        self._sizes, self._mesh, self._stored, self._bias = (inputs, width, experts), mesh, stored, bias
        is_gated = stored.gate is not None
        fused = is_gated and activation == "silu"
        self._act = GATED[activation] if is_gated else lambda ops, x: getattr(ops, OPERATOR_OF[activation])(x)
        self._numbers = numbers
        self._owned = mesh.expert.share(experts, "experts")
        self._width_share = mesh.share(width, "activations of an expert") if mesh.expert.size == 1 else (0, width)
        self._out_share = mesh.share(inputs) if mesh.expert.size == 1 else (0, inputs)
        pieces = ("gate", "up") if is_gated else ("up",)
        rows, outputs = self._width_share[1], self._out_share[1]
        fused = is_gated and activation == "silu"
        self._stacks = (
            ExpertStack("gate_up" if is_gated else "up", len(pieces) * rows, inputs, pieces, bias=bias, gated=fused),
            ExpertStack("down", outputs, width, ("down",), bias=bias, gated=False),
        )
        self._first: PreparedStack
        self._second: PreparedStack
        # on the meta device: what the weights take before they are packed
        for stack in self._stacks:
            plain = torch.empty(self._owned[1], stack.outputs, stack.inputs, device="meta")
            self.register_parameter(stack.name, nn.Parameter(plain, requires_grad=False))

    def forward(self, x: Tensor, routing: Routing, shared: Tensor | None = None, gate: Tensor | None = None) -> Tensor:
        """x, shared [tokens, inputs] → [tokens, inputs]; see `expert_sum`."""
        hidden = self._first(x, routing, of_tokens=True)
        if self._act is not None:
            hidden = self._act(self.ops, hidden, *self._numbers)
        mesh = self._mesh
        if mesh.expert.size > 1:
            # every row is that of one rank, plus zeros
            rows = mesh.sum(self._second(hidden, routing, of_tokens=False, in_float32=True))
            return self.ops.expert_sum(rows, routing, x.dtype, shared, gate)
        rows = self._second(mesh.gather(hidden), routing, of_tokens=False, in_float32=True)
        if shared is not None:
            shared = shared.narrow(1, *self._out_share)
        return mesh.gather(self.ops.expert_sum(rows, routing, x.dtype, shared, gate))

    @property
    def shared_out(self) -> tuple[int, int, int] | None:
        """(first, end, of how many): the experts of this rank where ranks share them, otherwise None."""
        (first, count), (_, _, experts) = self._owned, self._sizes
        return None if self._mesh.expert.size == 1 else (first, first + count, experts)

    def use(self, methods: Methods, path: str) -> None:
        """Raise CheckpointError where experts of one matrix are stored in several ways."""
        for stack in self._stacks:
            names = [name for name, _, _ in self._matrices(path, stack)]
            chosen = [methods(name) for name in names]
            # orders of inputs may differ: each expert keeps its own
            kinds = [replace(each, order="") if isinstance(each, Coded) else each for each in chosen]
            other = next((n for n, each in enumerate(kinds) if each != kinds[0]), None)
            if other is not None:
                raise CheckpointError(
                    f"{names[other]} is stored as {kinds[other].name} and {names[0]} as {kinds[0].name}, expected the "
                    "same for all experts of a layer"
                )
            stack.method = kinds[0]

    def formats(self, ops: Ops) -> Iterator[LinearFormat]:
        return (stack.method.format(ops) for stack in self._stacks)

    def _matrices(self, path: str, stack: ExpertStack) -> Iterator[tuple[str, int, str]]:
        """Yield name, expert and piece of each stored matrix; expert -1 for that of all experts."""
        up = "up_proj" if self._stored.gate is None else "gate_up_proj"
        matrices = {"gate": self._stored.gate, "up": self._stored.up, "down": self._stored.down}
        if self._stored.is_apart:
            for piece in stack.pieces:
                yield f"{path}.{matrices[piece]}{'' if self._stored.is_flat else '.weight'}", -1, piece
            return
        if self._stored.is_stacked:
            names = dict(zip(self._stacks, self._stored.stacks or (up, "down_proj"), strict=True))
            yield f"{path}.{names[stack]}", -1, ""
            return
        for expert in range(self._sizes[2]):
            for piece in stack.pieces:
                yield f"{path}.{expert}.{matrices[piece]}", expert, piece

    def bind(self, binding: Binding) -> None:
        super().bind(binding)
        self._device = binding.device

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        """Yield a tensor for each expert and matrix, or the stacked ones. Nothing is read of another rank's experts."""
        assert self._stored.is_stacked or not self._bias, "biases are read from stacked tensors"
        for stack in self._stacks:
            for name, expert, piece in self._matrices(path, stack):
                yield from self._slots_of(stack, name, expert, piece)

    def _slots_of(self, stack: ExpertStack, matrix: str, expert: int, piece: str) -> Iterator[TensorSlot]:
        """Yield the tensors of one stored matrix."""
        inputs, width, experts = self._sizes
        first, count = self._owned
        outputs = inputs if stack.name == "down" else width
        if expert >= 0:
            for tensor, (shape, dtype) in stack.tensors(outputs).items():
                name, rows = f"{matrix}.{tensor}", self._rows(piece)
                if not first <= expert < first + count:
                    yield TensorSlot(name, shape, _leave, parts=())
                    continue
                rows = slice(None) if tensor == "order" else rows
                fill = partial(_of_rows, partial(self._fill, name, stack, expert, piece, tensor), rows)
                yield TensorSlot(name, shape, fill, parts=((rows,),), dtype=dtype)
            return
        own, pieces = ((slice(first, first + count),),), (piece,) if piece else stack.pieces
        for tensor, (inner, dtype) in stack.tensors(outputs * len(pieces)).items():
            name = matrix if tensor == "weight" else f"{matrix}.{tensor}"
            turned = self._stored.is_transposed and tensor == "weight"
            shape = (experts, *(inner[::-1] if turned else inner))
            fill = partial(self._fill_all, name, stack, pieces, tensor, turned)
            if self._stored.is_flat:
                shape, own = (experts * width, inputs), ((slice(first * width, (first + count) * width),),)
                fill = partial(self._fill_flat, partial(self._fill_all, name, stack, pieces, tensor, piece == "down"))
            yield TensorSlot(name, shape, fill, parts=own, dtype=dtype)
        if self._bias:
            name, shape = f"{matrix}_bias", (experts, outputs * len(stack.pieces))
            yield TensorSlot(name, shape, partial(self._fill_all, name, stack, pieces, "bias", False), parts=own)

    def _rows(self, piece: str) -> slice:
        start, length = self._out_share if piece.startswith("down") else self._width_share
        return slice(start, start + length)

    def _fill(self, name: str, stack: ExpertStack, expert: int, piece: str, tensor: str, stored: Tensor) -> None:
        if not stack.has_begun:
            stack.begin(self.ops, self.get_parameter(stack.name).dtype, self._owned[1], self._device)
        try:
            stack.take(expert - self._owned[0], piece, tensor, stored)
        except NotFinite as error:
            raise CheckpointError(
                f"{name} holds NaN or an infinity, or a tensor that is stacked with it does (expert {expert}, row "
                f"{error.row}); it cannot be quantised, the checkpoint is damaged, download it again"
            ) from error

    def _fill_all(
        self, name: str, stack: ExpertStack, pieces: Sequence[str], tensor: str, turned: bool, stored: Tensor
    ) -> None:
        for expert in range(self._owned[0], sum(self._owned)):
            whole = stored[expert].t() if turned else stored[expert]
            for piece, rows in self._pieces(pieces, whole):
                self._fill(name, stack, expert, piece, tensor, rows)

    def _fill_flat(self, fill: Callable[[Tensor], None], stored: Tensor) -> None:
        inputs, width, experts = self._sizes
        fill(stored.view(experts, width, inputs))

    def _pieces(self, pieces: Sequence[str], whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield each piece with this rank's rows of it. whole: an expert's stacked matrix, outputs first."""
        for number, piece in enumerate(pieces):
            is_interleaved = self._stored.is_interleaved and len(pieces) > 1
            rows = whole[number :: len(pieces)] if is_interleaved else whole.chunk(len(pieces))[number]
            yield piece, rows[self._rows(piece)]

    def stacked(self) -> tuple[StackedWeight, StackedWeight]:
        """Return this rank's part of the two weights of its experts, before or after they are loaded."""
        inputs, width, _ = self._sizes
        outputs = len(self._stacks[0].pieces) * width
        names = "gate_up_proj" if self._stored.gate is not None else "up_proj", "down_proj"
        sizes = (inputs, outputs, self._stacks[0].outputs), (width, inputs, self._stacks[1].outputs)
        gate_up, down = (
            StackedWeight(name, *each, *self._owned, self._sizes[2]) for name, each in zip(names, sizes, strict=True)
        )
        return gate_up, down

    def own_outputs(self, number: int, whole: Tensor) -> Tensor:
        """Return this rank's rows of an expert's stacked matrix [outputs, any], in the order of its products."""
        return torch.cat([rows for _, rows in self._pieces(self._stacks[number].pieces, whole)])

    def linears(self, number: int) -> list[PreparedLinear]:
        """Return each expert's product with one of its weights, which stays where it is."""
        stack, state = self._stacks[number], (self._first, self._second)[number].state()
        return [
            stack.method.format(self.ops).restore(
                stack.shape(self._dtype), {name: tensor[expert] for name, tensor in state.items()}
            )
            for expert in range(self._owned[1])
        ]

    def wrap(self, number: int, around: Callable[[PreparedStack], PreparedStack]) -> None:
        """Replace the products with one of the weights by wrappers around them."""
        if number == 0:
            self._first = around(self._first)
        else:
            self._second = around(self._second)

    def finish(self) -> None:
        self._hold(*(stack.finish(self._owned[0]) for stack in self._stacks))

    def state_specs(self, ops: Ops) -> dict[str, TensorSpec]:
        return {
            f"{stack.name}.{name}": spec
            for stack in self._stacks
            for name, spec in stack.state_specs(ops, self.get_parameter(stack.name).dtype, self._owned[1]).items()
        }

    def state(self) -> dict[str, Tensor]:
        prepared = zip(self._stacks, (self._first, self._second), strict=True)
        return {f"{stack.name}.{name}": tensor for stack, each in prepared for name, tensor in each.state().items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        restored = []
        for stack in self._stacks:
            start, shape = f"{stack.name}.", stack.shape(self.get_parameter(stack.name).dtype)
            own = {name.removeprefix(start): tensor for name, tensor in state.items() if name.startswith(start)}
            restored.append(stack.method.format(self.ops).restore_stack(shape, own, self._owned[0]))
        self._hold(*restored)

    def _hold(self, first: PreparedStack, second: PreparedStack) -> None:
        self._first, self._second = first, second
        self._dtype = self.get_parameter(self._stacks[0].name).dtype
        for stack in self._stacks:
            self.register_parameter(stack.name, None)


def _of_rows(fill: partial[None], rows: slice, stored: Tensor) -> None:
    fill(stored[rows])


def _leave(stored: Tensor) -> None:
    """Ignore a tensor of another rank."""
