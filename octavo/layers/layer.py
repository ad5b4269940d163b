"""The base class of layers with weights or operators, and its contract with the loader."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from octavo.attention.backend import AttentionBackend
from octavo.ops.memory import Scratch, zeroed
from octavo.ops.prepare_linear import LinearShape, PreparedLinear, TensorSpec
from octavo.ops.registry import Ops
from octavo.quantization.method import UNQUANTIZED, WeightMethod

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
    """What `fill` reads of it. The rest may be whatever lies there."""
    required: bool = True
    """False for a tensor that may be absent: it repeats what another layer holds, and is filled after all others."""


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
        value: T = self.made[key]
        return value


class Layer(nn.Module):
    """A module that reads tensors or runs operators. By default each parameter is one tensor of the same name.

    Its parameters may lie on the meta device until they are filled. In this order: `bind`, then every slot of
    `tensor_slots` is filled, then `finish`; or `bind`, then `restore`.
    """

    ops: Ops

    def use(self, method: WeightMethod) -> None:
        """Keep the weight by `method`, before anything is filled. By default there is none to quantise."""

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        """Yield the tensors of the layer at `path` in the checkpoint (`layers.0.mlp.down_proj`)."""
        for name, parameter in self.named_parameters(recurse=False):
            yield TensorSlot(f"{path}.{name}", tuple(parameter.shape), partial(self.hold, name))

    def bind(self, binding: Binding) -> None:
        """Store the operators that the layer runs."""
        self.ops = binding.ops

    def finish(self) -> None:
        """Bring the filled parameters into the form that computes best. By default they stay as they are."""

    def state_specs(self, ops: Ops) -> dict[str, TensorSpec]:
        """Return the specs of what `state` will return once the layer is finished; called before it is filled."""
        return {name: TensorSpec.of(parameter) for name, parameter in self.named_parameters(recurse=False)}

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
            parameter = nn.Parameter(zeroed(tuple(parameter.shape), parameter.dtype, device), requires_grad=False)
            self.register_parameter(name, parameter)
        return parameter.data


class CachedLayer(Layer):
    """A layer that reads a cache, which is its own unless `shares_cache_of` names another layer.

    `cache_index` is the place of its cache in `ModelInput.kv_caches`, `cache_group` that of its cache group in
    `ModelInput.attention`; the decoder that has the layer sets both.
    """

    cache_index = 0
    cache_group = 0
    shares_cache_of: int | None = None
    """The layer whose cache it reads, and does not write; None where it has one of its own."""


class PreparedLayer(Layer):
    """A layer with one weight that is multiplied, which a `WeightMethod` keeps: `prepared` once it is finished."""

    prepared: PreparedLinear
    _scratch: Scratch

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, gated: bool = False) -> None:
        super().__init__()
        self._sizes = (inputs, outputs, bias)
        self._gated = gated
        self.use(UNQUANTIZED)

    def use(self, method: WeightMethod) -> None:
        self.method = method
        method.make(self, *self._sizes)

    def bind(self, binding: Binding) -> None:
        super().bind(binding)
        self._scratch = binding.scratch

    def room(self, name: str, device: torch.device) -> Tensor:
        """Take memory that is returned to the scratch once the layer is finished."""
        parameter = self.get_parameter(name)
        if parameter.is_meta:
            memory = self._scratch.take(tuple(parameter.shape), parameter.dtype, device)
            self.register_parameter(name, nn.Parameter(memory, requires_grad=False))
        return self.get_parameter(name).data

    def hold(self, name: str, value: Tensor) -> None:
        """Make `value` the parameter `name`, without a copy where type and order are right: `finish` copies it."""
        held = value.to(self.get_parameter(name).dtype).contiguous()
        self.register_parameter(name, nn.Parameter(held, requires_grad=False))

    def finish(self) -> None:
        """Prepare the weight and release what it was made from."""
        self.prepared = self.method.finish(self, self.ops, gated=self._gated)
        self._release()

    def state_specs(self, ops: Ops) -> dict[str, TensorSpec]:
        return self.method.format(ops).state_specs(self._shape())

    def state(self) -> dict[str, Tensor]:
        return self.prepared.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.prepared = self.method.format(self.ops).restore(self._shape(), state)
        self._release()

    def _shape(self) -> LinearShape:
        inputs, outputs, bias = self._sizes
        dtype = next(each.dtype for each in self.parameters(recurse=False) if each.is_floating_point())
        return LinearShape(outputs, inputs, dtype, bias, self._gated)

    def _release(self) -> None:
        for name, parameter in list(self.named_parameters(recurse=False)):
            self.register_parameter(name, None)
            self._scratch.give_back(parameter.data)
