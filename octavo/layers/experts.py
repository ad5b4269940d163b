"""Mixtures of experts: the router, and the experts' weights, shared by the ranks of a mesh.

The ranks share the width of every expert, or whole experts where the mesh has an `expert` axis. Each output is summed
up by one rank in either case: the same bits on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError
from octavo.layers.elementwise import OPERATOR_OF
from octavo.layers.layer import Binding, Layer, TensorSlot
from octavo.layers.linear import ColumnLinear
from octavo.ops.codes import NotFinite
from octavo.ops.experts import PreparedStack, RouterRule, Routing
from octavo.ops.prepare_linear import LinearFormat, LinearShape, TensorSpec
from octavo.ops.registry import Ops
from octavo.quantization.method import UNQUANTIZED, WeightMethod

_GATED: Final[Mapping[str, str | None]] = {
    "silu": None,
    "gelu_pytorch_tanh": "gelu_tanh_and_mul",
    "clamped_swiglu": "clamped_swiglu",
}
"""Operators of gate beside up, by names of activations; that of silu is a part of the product."""


class ExactLinear(ColumnLinear):
    """A small product that is whole on every rank, never quantised, and returned in float32."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__(inputs, outputs, Mesh.single(), bias=bias)

    def use(self, method: WeightMethod) -> None:
        super().use(UNQUANTIZED)

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, inputs] → float32 [tokens, outputs]."""
        return self.prepared.in_float32(x)


class Router(ExactLinear):
    """x [tokens, inputs] → the experts of each token.

    `correction` and `factors` name tensors [experts], beside the router in the checkpoint's tree: of what is added to
    scores for the choice, and of what weights are multiplied with.
    """

    def __init__(
        self,
        inputs: int,
        experts: int,
        rule: RouterRule,
        *,
        bias: bool = False,
        correction: str | None = None,
        factors: str | None = None,
    ) -> None:
        super().__init__(inputs, experts, bias=bias)
        self.rule, self._experts = rule, experts
        names = {"correction": correction, "factors": factors}
        self._names = {own: name for own, name in names.items() if name is not None}
        self._beside: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Routing:  # type: ignore[override]
        """x [tokens, inputs] → routing."""
        logits, get = self.prepared.in_float32(x), self._beside.get
        routing: Routing = self.ops.route(logits, self.rule, get("correction"), get("factors"))
        return routing

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        yield from super().tensor_slots(path)
        for own, beside in self._names.items():
            name = f"{path.rpartition('.')[0]}.{beside}".removeprefix(".")
            yield TensorSlot(name, (self._experts,), partial(self._fill_beside, own))

    def _fill_beside(self, own: str, stored: Tensor) -> None:
        self._beside[own] = stored.float().clone()

    def state_specs(self, ops: Ops) -> dict[str, TensorSpec]:
        own = {name: TensorSpec((self._experts,), torch.float32) for name in self._names}
        return {**super().state_specs(ops), **own}

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), **self._beside}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        own = dict(state)
        self._beside = {name: own.pop(name) for name in self._names}
        super().restore(own)


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
    """Names of the stacked tensors where they have others."""


class _Stack:
    """One weight of every expert: each is packed as soon as all of its pieces have arrived."""

    def __init__(self, name: str, outputs: int, inputs: int, pieces: tuple[str, ...], *, gated: bool) -> None:
        self.name, self.pieces = name, pieces
        self.outputs, self.inputs, self.gated = outputs, inputs, gated
        self._state: dict[str, Tensor] = {}
        self._arrived: dict[int, dict[str, Tensor]] = {}

    def shape(self, dtype: torch.dtype) -> LinearShape:
        """Return the shape of each weight."""
        return LinearShape(self.outputs, self.inputs, dtype, any("bias" in each for each in self.pieces), self.gated)

    def begin(self, kept: LinearFormat, dtype: torch.dtype, experts: int, device: torch.device | str) -> None:
        """Take memory for `experts` weights."""
        self._format, self._dtype = kept, dtype
        specs = _stacked(kept.state_specs(self.shape(dtype)), experts)
        self._state = {name: kept.zeros(spec, device) for name, spec in specs.items()}

    @property
    def has_begun(self) -> bool:
        """Whether there is memory for the weights."""
        return bool(self._state)

    def take(self, expert: int, piece: str, stored: Tensor) -> None:
        """Keep a piece until all are there. Raises NotFinite."""
        pieces = self._arrived.setdefault(expert, {})
        pieces[piece] = stored
        if len(pieces) < len(self.pieces):
            return
        del self._arrived[expert]
        weights = [pieces[each] for each in self.pieces if "bias" not in each]
        biases = [pieces[each] for each in self.pieces if "bias" in each]
        weight = (weights[0] if len(weights) == 1 else torch.cat(weights)).to(self._dtype)
        bias = torch.cat(biases).to(self._dtype) if biases else None
        own = {name: tensor[expert] for name, tensor in self._state.items()}
        self._format.pack_into(own, weight, bias, gated=self.gated)

    def finish(self, first: int) -> PreparedStack:
        """Return the weights, ready to be multiplied."""
        assert not self._arrived, f"experts {list(self._arrived)} lack pieces"
        state, self._state = self._state, {}
        return self._format.restore_stack(self.shape(self._dtype), state, first)


class Experts(Layer):
    """down(act(gate(x)) · up(x)) of every expert that a token takes, and their weighted sum.

    `activation` is silu, gelu_pytorch_tanh or clamped_swiglu with its `numbers`; without a gate, a key of
    `OPERATOR_OF`.
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
        self._activation = _GATED[activation] if is_gated else OPERATOR_OF[activation]
        self._numbers = numbers
        self._owned = mesh.expert.share(experts, "experts")
        self._width_share = mesh.share(width, "activations of an expert") if mesh.expert.size == 1 else (0, width)
        self._out_share = mesh.share(inputs) if mesh.expert.size == 1 else (0, inputs)
        parts = ("gate", "up") if is_gated else ("up",)
        pieces = (*parts, *(f"{each} bias" for each in parts if bias))
        rows, outputs = self._width_share[1], self._out_share[1]
        fused = is_gated and activation == "silu"
        self._stacks = (
            _Stack("gate_up" if is_gated else "up", len(parts) * rows, inputs, pieces, gated=fused),
            _Stack("down", outputs, width, ("down", "down bias") if bias else ("down",), gated=False),
        )
        # on the meta device: what the weights take before they are packed
        for stack in self._stacks:
            plain = torch.empty(self._owned[1], stack.outputs, stack.inputs, device="meta")
            self.register_parameter(stack.name, nn.Parameter(plain, requires_grad=False))
        self.use(UNQUANTIZED)

    def forward(self, x: Tensor, routing: Routing, shared: Tensor | None = None, gate: Tensor | None = None) -> Tensor:
        """x, shared [tokens, inputs] → [tokens, inputs]; see `expert_sum`."""
        hidden = self._first(x, routing, of_tokens=True)
        if self._activation is not None:
            hidden = getattr(self.ops, self._activation)(hidden, *self._numbers)
        mesh = self._mesh
        if mesh.expert.size > 1:
            # every row is that of one rank, plus zeros
            rows = mesh.sum(self._second(hidden, routing, of_tokens=False, in_float32=True))
            whole: Tensor = self.ops.expert_sum(rows, routing, x.dtype, shared, gate)
            return whole
        rows = self._second(mesh.gather(hidden), routing, of_tokens=False, in_float32=True)
        if shared is not None:
            shared = shared.narrow(1, *self._out_share)
        return mesh.gather(self.ops.expert_sum(rows, routing, x.dtype, shared, gate))

    @property
    def shared_out(self) -> tuple[int, int, int] | None:
        """(first, end, of how many): the experts of this rank where ranks share them, otherwise None."""
        (first, count), (_, _, experts) = self._owned, self._sizes
        return None if self._mesh.expert.size == 1 else (first, first + count, experts)

    def use(self, method: WeightMethod) -> None:
        self._method = method

    def bind(self, binding: Binding) -> None:
        super().bind(binding)
        self._device = binding.device

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        """Yield a tensor for each expert and matrix, or the stacked ones. Nothing is read of another rank's experts."""
        if self._stored.is_stacked:
            yield from self._stacked_slots(path)
            return
        assert not self._bias, "biases are read from stacked tensors"
        inputs, width, experts = self._sizes
        own = range(self._owned[0], sum(self._owned))
        names = {"gate": self._stored.gate, "up": self._stored.up, "down": self._stored.down}
        for expert in range(experts):
            for stack in self._stacks:
                for piece in stack.pieces:
                    name, rows = f"{path}.{expert}.{names[piece]}.weight", self._rows(piece)
                    shape = (inputs, width) if piece == "down" else (width, inputs)
                    if expert not in own:
                        yield TensorSlot(name, shape, _leave, parts=())
                        continue
                    fill = partial(_of_rows, partial(self._fill, name, stack, expert, piece), rows)
                    yield TensorSlot(name, shape, fill, parts=((rows,),))

    def _stacked_slots(self, path: str) -> Iterator[TensorSlot]:
        inputs, width, experts = self._sizes
        first, count = self._owned
        own = ((slice(first, first + count),),)
        up = ("up_proj", width) if self._stored.gate is None else ("gate_up_proj", 2 * width)
        names = self._stored.stacks or (up[0], "down_proj")
        for stack, matrix, outputs, columns in zip(self._stacks, names, (up[1], inputs), (inputs, width), strict=True):
            shape = (experts, columns, outputs) if self._stored.is_transposed else (experts, outputs, columns)
            name = f"{path}.{matrix}"
            yield TensorSlot(name, shape, partial(self._fill_all, name, stack, ""), parts=own)
            if self._bias:
                name = f"{name}_bias"
                yield TensorSlot(name, (experts, outputs), partial(self._fill_all, name, stack, " bias"), parts=own)

    def _rows(self, piece: str) -> slice:
        start, length = self._out_share if piece.startswith("down") else self._width_share
        return slice(start, start + length)

    def _fill(self, name: str, stack: _Stack, expert: int, piece: str, stored: Tensor) -> None:
        if not stack.has_begun:
            dtype = self.get_parameter(stack.name).dtype
            stack.begin(self._method.format(self.ops), dtype, self._owned[1], self._device)
        try:
            stack.take(expert - self._owned[0], piece, stored)
        except NotFinite as error:
            raise CheckpointError(
                f"{name} holds NaN or an infinity, or a tensor that is stacked with it does (expert {expert}, row "
                f"{error.row}); it cannot be quantised, the checkpoint is damaged, download it again"
            ) from error

    def _fill_all(self, name: str, stack: _Stack, kind: str, stored: Tensor) -> None:
        pieces = [each for each in stack.pieces if each.endswith(" bias") == bool(kind)]
        for expert in range(self._owned[0], sum(self._owned)):
            weight = stored[expert].t() if self._stored.is_transposed and not kind else stored[expert]
            for number, piece in enumerate(pieces):
                if len(pieces) == 1:
                    rows = weight
                elif self._stored.is_interleaved:
                    rows = weight[number::2]
                else:
                    rows = weight.chunk(2)[number]
                self._fill(name, stack, expert, piece, rows[self._rows(piece)])

    def finish(self) -> None:
        self._hold(*(stack.finish(self._owned[0]) for stack in self._stacks))

    def state_specs(self, ops: Ops) -> dict[str, TensorSpec]:
        kept = self._method.format(ops)
        return {
            f"{stack.name}.{name}": spec
            for stack in self._stacks
            for name, spec in _stacked(kept.state_specs(self._shape(stack)), self._owned[1]).items()
        }

    def state(self) -> dict[str, Tensor]:
        prepared = zip(self._stacks, (self._first, self._second), strict=True)
        return {f"{stack.name}.{name}": tensor for stack, each in prepared for name, tensor in each.state().items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        kept, restored = self._method.format(self.ops), []
        for stack in self._stacks:
            start = f"{stack.name}."
            own = {name.removeprefix(start): tensor for name, tensor in state.items() if name.startswith(start)}
            restored.append(kept.restore_stack(self._shape(stack), own, self._owned[0]))
        self._hold(*restored)

    def _shape(self, stack: _Stack) -> LinearShape:
        return stack.shape(self.get_parameter(stack.name).dtype)

    def _hold(self, first: PreparedStack, second: PreparedStack) -> None:
        self._first, self._second = first, second
        for stack in self._stacks:
            self.register_parameter(stack.name, None)


def _stacked(specs: Mapping[str, TensorSpec], experts: int) -> dict[str, TensorSpec]:
    return {name: TensorSpec((experts, *spec.shape), spec.dtype) for name, spec in specs.items()}


def _of_rows(fill: partial[None], rows: slice, stored: Tensor) -> None:
    fill(stored[rows])


def _leave(stored: Tensor) -> None:
    """Keep nothing of what another rank has."""
