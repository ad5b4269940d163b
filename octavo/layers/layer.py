"""The base class of layers with weights or operators, and its contract with the loader."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, ClassVar, Final, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

from octavo.attention.backend import AttentionBackend
from octavo.layers.side_by_side import SideBySide
from octavo.ops.memory import Scratch, zeroed
from octavo.ops.prepare_linear import LinearFormat, LinearShape, PreparedLinear, TensorSpec
from octavo.ops.registry import Ops
from octavo.quantization.method import UNQUANTIZED, Methods, WeightMethod

T = TypeVar("T")


Parts = tuple[tuple[slice, ...], ...]
"""Indices of parts of a tensor: `tensor[part]` for each part."""

WHOLE: Final[Parts] = ((),)


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """One checkpoint tensor that a layer reads."""

    name: str
    """Its name, without the prefix of all names of a model in the checkpoint."""
    shape: tuple[int, ...]
    """Its shape in the checkpoint."""
    fill: Callable[[Tensor], None]
    """Makes it, or this rank's share of it, the parameter or a part of it, in the parameter's type. The tensor may be a
    view of a mapped file; it stays as it is until the layer is finished."""
    parts: Parts = WHOLE
    """The parts that `fill` reads. The rest of the tensor may have any values."""
    required: bool = True
    """False for a tensor that may be absent: it repeats what another layer holds, and is filled after all others."""
    dtype: torch.dtype | None = None
    """Its type where it is none of a plain weight."""


@dataclass(frozen=True, slots=True)
class Binding:
    """The operators and the attention backend chosen at start, which layers are bound to."""

    ops: Ops
    backend: AttentionBackend
    max_positions: int = 4096
    """Positions of the longest sequence of a step, which may be a made-up one."""
    max_model_len: int = 4096
    """Positions of the longest sequence that is served."""
    device: torch.device | str = "cpu"
    """The device of the weights."""
    scratch: Scratch = field(default_factory=Scratch, repr=False)
    """Where weights of several tensors are put together, each until its layer is finished."""
    made: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    """What `once` has made."""

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return `make()` at the first call with `key`, and the same object afterwards: what layers share."""
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]


class Layer(nn.Module):
    """A module that reads tensors or runs operators. By default each parameter is one tensor of the same name.

    Its parameters may lie on the meta device until they are filled. In this order: `bind`, then every slot of
    `tensor_slots` is filled, then `finish`; or `bind`, then `restore`.
    """

    parameter_dtype: ClassVar[torch.dtype | None] = None
    """The type of the parameters where it is not that of the model."""
    ops: Ops

    def use(self, methods: Methods, path: str) -> None:
        """Keep each weight of the layer at `path` by its method, before anything is filled. By default it has none."""

    def formats(self, ops: Ops) -> Iterator[LinearFormat]:
        """Yield the formats of the weights that are multiplied."""
        yield from ()

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        """Yield the tensors of the layer at `path` in the checkpoint (`layers.0.mlp.down_proj`)."""
        for name, parameter in self.named_parameters(recurse=False):
            yield TensorSlot(f"{path}.{name}", tuple(parameter.shape), partial(self.hold, name))

    def rows_slot(self, stored: str, shape: tuple[int, ...], rows: slice, name: str = "weight") -> TensorSlot:
        """Return the slot of a stored tensor of this shape, of which the parameter `name` has `rows`."""
        return TensorSlot(stored, shape, lambda tensor: self.hold(name, tensor[rows]), parts=((rows,),))

    def bind(self, binding: Binding) -> None:
        """Store the operators that the layer runs."""
        self.ops = binding.ops

    def finish(self) -> None:
        """Bring the filled parameters into the form that computes best. By default they stay as they are."""

    def state_specs(self, ops: Ops) -> dict[str, TensorSpec]:
        """Return the specs of what `state` will return once the layer is finished; called before it is filled."""
        own = self.named_parameters(recurse=False)
        return {name: TensorSpec(tuple(each.shape), self.parameter_dtype or each.dtype) for name, each in own}

    def state(self) -> dict[str, Tensor]:
        """Return all tensors that the finished layer keeps, by names that are unique in it."""
        return {name: parameter.data for name, parameter in self.named_parameters(recurse=False)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Set what `state` returned instead of filling and finishing; the tensors meet `state_specs`."""
        for name, tensor in state.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def hold(self, name: str, value: Tensor) -> None:
        """Copy `value` into the parameter `name`."""
        self.room(name, value.device).copy_(value)

    def room(self, name: str, device: torch.device) -> Tensor:
        """Return the memory of parameter `name`, allocated now if it had none."""
        parameter = self.get_parameter(name)
        if parameter.is_meta:
            parameter = nn.Parameter(self._memory(parameter, device), requires_grad=False)
            self.register_parameter(name, parameter)
        return parameter.data

    def _memory(self, parameter: nn.Parameter, device: torch.device) -> Tensor:
        """Return the memory of a parameter that has none."""
        return zeroed(tuple(parameter.shape), self.parameter_dtype or parameter.dtype, device)


class CachedLayer(Layer):
    """A layer that reads a cache, which is its own unless `shares_cache_of` names another layer.

    `cache_index` is the place of its cache in `ModelInput.kv_caches`, `cache_group` that of its cache group in
    `ModelInput.attention`; the decoder that has the layer sets both.
    """

    cache_index = 0
    cache_group = 0
    shares_cache_of: int | None = None
    """The layer whose cache it reads, and does not write; None where it has one of its own."""

    @property
    def sees_ahead(self) -> bool:
        """Whether tokens see those behind them."""
        return False


class Filling(NamedTuple):
    """A parameter of a prepared layer: what it holds of the outputs [start, stop)."""

    key: str
    """Its name in the layer."""
    name: str
    """What stands behind the name of the weight in the checkpoint: `weight`, `codes`, `bias`."""
    start: int
    stop: int
    inner: tuple[int, ...]
    """All dimensions but that of outputs."""
    dtype: torch.dtype | None = None
    """Its type where it is none of a plain weight."""


class _Part(NamedTuple):
    """Neighbouring outputs [start, stop) of a layer whose weights one method keeps."""

    method: WeightMethod
    start: int
    stop: int
    suffix: str
    """What distinguishes the names of its parameters."""


class PreparedLayer(Layer):
    """A layer with one weight that is multiplied, which a `WeightMethod` keeps: `prepared` once it is finished.

    Where the stored weights of its outputs are kept by several methods, it has a part for each.
    """

    prepared: PreparedLinear
    _scratch: Scratch

    def __init__(
        self, inputs: int, outputs: int, *, bias: bool = False, gated: bool = False, all_outputs: int = 0
    ) -> None:
        """outputs: of this rank; all_outputs: of all ranks, 0 where these are all."""
        super().__init__()
        self._sizes = (inputs, outputs, bias)
        self._all_outputs = all_outputs or outputs
        self._gated = gated
        self._dtype = torch.get_default_dtype()
        self._parts: tuple[_Part, ...] = ()
        self._keep([(UNQUANTIZED, outputs)])

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, inputs] → [tokens, outputs]."""
        return self.prepared(x)

    def use(self, methods: Methods, path: str) -> None:
        self._keep([(methods(name), length) for name, length in self.sources(path)])

    @property
    def num_inputs(self) -> int:
        """Columns of this rank's weight."""
        return self._sizes[0]

    @property
    def num_outputs(self) -> int:
        """Rows of this rank's weight; of a gated one, gate and up together."""
        return self._sizes[1]

    @property
    def dtype(self) -> torch.dtype:
        """The type of what it reads and returns."""
        return self._shape().dtype

    def sources(self, path: str) -> list[tuple[str, int]]:
        """Return the names of the stored weights of the outputs, in their order, and how many outputs each has."""
        return [(path, self._sizes[1])]

    def with_inputs(self, inputs: int) -> Self:
        """Return a layer with these outputs for so many inputs, to be filled with plain weights in float32."""
        made = copy(self)
        made._parameters, made._scratch, made._dtype = {}, Scratch(), torch.float32
        made._sizes = (inputs, self._sizes[1], False)
        made._keep([(UNQUANTIZED, self._sizes[1])])
        return made

    def fillings(self) -> Iterator[Filling]:
        """Yield what the layer is filled with."""
        for part in self._parts:
            for name, spec in part.method.tensors(self._shape(part)).items():
                inner = spec.shape if name == "order" else spec.shape[1:]
                dtype = None if name == "weight" else spec.dtype
                yield Filling(name + part.suffix, name, part.start, part.stop, inner, dtype)
        if self._sizes[2]:
            yield Filling("bias", "bias", 0, self._sizes[1], ())

    def slot(
        self, held: Filling, stored: str, outputs: int, fill: Callable[[Tensor], None], parts: Parts = WHOLE
    ) -> TensorSlot:
        """Return the slot of what is `held` of the weight named `stored`, which has `outputs`."""
        name = f"{stored}.{held.name}"
        if held.name == "order":
            return TensorSlot(name, held.inner, partial(self.hold, held.key), dtype=held.dtype)
        return TensorSlot(name, (outputs, *held.inner), fill, parts, dtype=held.dtype)

    def bind(self, binding: Binding) -> None:
        super().bind(binding)
        self._scratch = binding.scratch

    def _memory(self, parameter: nn.Parameter, device: torch.device) -> Tensor:
        """Take memory that is returned to the scratch once the layer is finished."""
        return self._scratch.take(tuple(parameter.shape), parameter.dtype, device)

    def hold(self, name: str, value: Tensor) -> None:
        """Make `value` the parameter `name`, without a copy where type and order are right: `finish` copies it."""
        held = value.to(self.get_parameter(name).dtype).contiguous()
        self.register_parameter(name, nn.Parameter(held, requires_grad=False))

    def finish(self) -> None:
        """Prepare the weight and release what it was made from."""
        bias = self.get_parameter("bias").data if self._sizes[2] else None
        made = []
        for part in self._parts:
            shape, own = self._shape(part), None if bias is None else bias[part.start : part.stop]
            filled = {name: self.get_parameter(name + part.suffix).data for name in part.method.tensors(shape)}
            made.append(part.method.pack(self.ops, shape, filled, own))
        self._release(made)

    def formats(self, ops: Ops) -> Iterator[LinearFormat]:
        return (part.method.format(ops) for part in self._parts)

    def state_specs(self, ops: Ops) -> dict[str, TensorSpec]:
        return {
            name + part.suffix: spec
            for part in self._parts
            for name, spec in part.method.format(ops).state_specs(self._shape(part)).items()
        }

    def state(self) -> dict[str, Tensor]:
        return self.prepared.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        made = []
        for part in self._parts:
            kept, shape = part.method.format(self.ops), self._shape(part)
            made.append(kept.restore(shape, {name: state[name + part.suffix] for name in kept.state_specs(shape)}))
        self._release(made)

    def _keep(self, methods: Sequence[tuple[WeightMethod, int]]) -> None:
        """Make the parameters of weights that are kept by these methods, each for so many outputs."""
        device = next((each.device for each in self.parameters(recurse=False)), None)
        self._dtype, stop = self._shape().dtype, 0
        parts: list[_Part] = []
        for method, run in groupby(methods, lambda pair: pair[0]):
            start, stop = stop, stop + sum(length for _, length in run)
            parts.append(_Part(method, start, stop, f"/{len(parts)}"))
        self._parts = tuple(parts) if len(parts) > 1 else (parts[0]._replace(suffix=""),)
        specs = {
            name + part.suffix: spec
            for part in self._parts
            for name, spec in part.method.tensors(self._shape(part)).items()
        }
        if self._sizes[2]:
            specs["bias"] = TensorSpec((self._sizes[1],), self._dtype)
        self._parameters.clear()
        for name, spec in specs.items():
            empty = torch.empty(spec.shape, dtype=spec.dtype, device=device)
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))

    def _shape(self, part: _Part | None = None) -> LinearShape:
        """Return the shape of the whole, or of one of several parts, which are multiplied without the gate."""
        inputs, outputs, bias = self._sizes
        dtype = next(
            (
                each.dtype
                for name, each in self._parameters.items()
                if each is not None and name.startswith(("weight", "bias"))
            ),
            self._dtype,
        )
        if part is None or len(self._parts) == 1:
            return LinearShape(outputs, inputs, dtype, bias, self._gated, self._all_outputs)
        own = part.stop - part.start
        return LinearShape(own, inputs, dtype, bias, all_outputs=own * self._all_outputs // outputs)

    def _release(self, made: list[PreparedLinear]) -> None:
        """Multiply by what was `made` of the parts, and release what they were made from."""
        self._dtype = self.dtype
        for part, each in zip(self._parts, made, strict=True):
            each.shape = self._shape(part)  # a format knows the weight of this rank alone
        if len(made) == 1:
            self.prepared = made[0]
        else:
            self.prepared = SideBySide(
                self._shape(), {part.suffix: each for part, each in zip(self._parts, made, strict=True)}
            )
        for name, parameter in list(self.named_parameters(recurse=False)):
            self.register_parameter(name, None)
            self._scratch.give_back(parameter.data)
