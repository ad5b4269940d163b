"""Adapters of experts: PEFT's `target_parameters`, which change the stacked weights of a mixture.

Of a parameter PEFT saves A [experts · rank, inputs], expert after expert, and B [outputs, rank · experts], in which an
expert's columns are `experts` apart. A product with single experts is made again for the rows that have an adapter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.layers.expert_stack import StackedWeight
from octavo.layers.experts import Experts
from octavo.lora.adapter_config import AdapterConfig, is_end_of
from octavo.lora.step_slots import StepSlots
from octavo.models.decoder import DecoderStack
from octavo.ops.experts import PreparedStack, Routing
from octavo.ops.lora import Factors, LoRAShape, Run, SlotLinear
from octavo.ops.prepare_linear import PreparedLinear
from octavo.ops.registry import Ops

_BASE: Final = ".base_layer"
"""PEFT appends it to the name of a module once for each changed parameter after the first."""


@dataclass(frozen=True, slots=True)
class ExpertTarget:
    """One of the two weights of the experts of a layer."""

    path: str
    """Path of the experts, as transformers names them."""
    number: int
    layer: Experts
    weight: StackedWeight
    shape: LoRAShape

    @property
    def parameter(self) -> str:
        """The full name of the weight."""
        return f"{self.path}.{self.weight.name}"

    def num_elements(self, rank: int) -> int:
        """Return the elements of A and B of an adapter."""
        return rank * self.weight.count * (self.shape.inputs + self.shape.outputs)

    @property
    def keys(self) -> list[str]:
        """A name for each expert of this rank."""
        return [f"{self.parameter}.{self.weight.first + each}" for each in range(self.weight.count)]

    def factors(self, a: Tensor, b: Tensor, rank: int, scale: float, dtype: torch.dtype) -> Iterator[Factors]:
        """Yield what the adapter has for each expert of this rank. dtype: to which values are rounded."""
        first, count, experts = self.weight.first, self.weight.count, self.weight.experts
        down, up = a.view(experts, rank, -1), b.view(len(b), rank, experts)
        for expert in range(first, first + count):
            own = self.layer.own_outputs(self.number, up[..., expert])
            kept_a, kept_b = (each.to(dtype).to(self.shape.dtype).contiguous() for each in (down[expert], own))
            yield Factors(kept_a, kept_b, scale)


def expert_targets(model: DecoderStack, num_slots: int, held: torch.dtype) -> Iterator[ExpertTarget]:
    """Yield the weights of experts that adapters may change. held: type of A and B in memory."""
    for path, layer in model.layers_by_path():
        if isinstance(layer, Experts):
            for number, weight in enumerate(layer.stacked()):
                runs = (Run(0, weight.own_outputs, 0),)
                shape = LoRAShape(weight.inputs, weight.own_outputs, runs, num_slots, held)
                yield ExpertTarget(path.replace("block_sparse_moe", "mlp"), number, layer, weight, shape)


def slots_of(target: ExpertTarget, ops: Ops) -> dict[str, SlotLinear]:
    """Return empty slots for each expert of this rank, by its key."""
    return {key: ops.slot_linear(target.shape) for key in target.keys}


class AdaptedStack(PreparedStack):
    """The products of experts; those of rows with an adapter are computed once more, with its addends."""

    def __init__(
        self, base: PreparedStack, linears: Sequence[PreparedLinear], slots: Sequence[SlotLinear], step: StepSlots
    ) -> None:
        super().__init__(base.state(), base.first)
        self._base, self._linears, self._slots, self._step = base, linears, slots, step

    def __call__(self, x: Tensor, routing: Routing, *, of_tokens: bool, in_float32: bool = False) -> Tensor:
        out, of_token = self._base(x, routing, of_tokens=of_tokens, in_float32=in_float32), self._step.of_row
        if of_token is None:
            return out
        tokens, starts = routing.order.long() // routing.weights.shape[1], routing.starts.tolist()
        of_row = of_token[tokens]
        for number, (linear, slots) in enumerate(zip(self._linears, self._slots, strict=True), self.first):
            rows = starts[number] + of_row[starts[number] : starts[number + 1]].nonzero()[:, 0]
            if not len(rows):
                continue
            own = x[tokens[rows]] if of_tokens else x[rows]
            room = torch.empty(len(rows) * slots.shape.outputs)
            add = slots(own, of_row[rows], room)
            if in_float32:
                assert not linear.shape.is_gated, "a gated product is rounded"
                out[rows] += add
            else:
                out[rows] = linear(own, add)
        return out


class ExpertTensors:
    """The tensors of an adapter's file that change experts of a model."""

    def __init__(self, targets: Sequence[ExpertTarget]) -> None:
        self._targets: dict[str, list[ExpertTarget]] = {}
        for target in targets:
            self._targets.setdefault(target.path, []).append(target)

    @property
    def is_enabled(self) -> bool:
        """Whether there are experts that adapters may change."""
        return bool(self._targets)

    def path_of(self, module: str) -> str | None:
        """Return the path of the experts that a module of the file is, without prefix; None for another module."""
        return next((path for path in self._targets if is_end_of(path, without_base(module))), None)

    def target_of(self, file: Path, module: str, a: Tensor, b: Tensor, config: AdapterConfig) -> ExpertTarget:
        """Return which weight a pair of matrices changes, by their shapes. Raises CheckpointError."""
        targets, wanted = self._targets[self.path_of(module) or ""], []
        for target in targets:
            weight, rank = target.weight, config.rank_of(target.parameter)
            shapes = (weight.experts * rank, weight.inputs), (weight.outputs, weight.experts * rank)
            if (tuple(a.shape), tuple(b.shape)) == shapes:
                return target
            wanted.append(f"{list(shapes[0])} and {list(shapes[1])} of {weight.name}")
        raise CheckpointError(
            f"{file}: {module} has A {list(a.shape)} and B {list(b.shape)}, the model and adapter_config.json require "
            f"{' or '.join(wanted)}"
        )

    def check(self, file: Path, config: AdapterConfig, found: Iterable[ExpertTarget]) -> None:
        """Compare weights that are changed with those that the config names. Raises CheckpointError."""
        changed = [each.parameter for each in found]
        for name in changed:
            if changed.count(name) > 1:
                raise CheckpointError(f"{file}: holds {name} twice")
            if not any(is_end_of(each, name) for each in config.parameters):
                raise CheckpointError(f"{file}: holds {name}, which target_parameters of {config.path} does not name")


def without_base(module: str) -> str:
    """Return the name of a module without what PEFT adds for each further parameter of it."""
    while module.endswith(_BASE):
        module = module.removesuffix(_BASE)
    return module
