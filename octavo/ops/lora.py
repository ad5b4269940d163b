"""What adapters add to a product: scale · B · A · x, for each row with the matrices of its own adapter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.ops.prepare_linear import linear
from octavo.ops.registry import Operator


class Run(NamedTuple):
    """Neighbouring outputs [start, start + length) of a layer that are of one stored weight, its `source`."""

    start: int
    length: int
    source: int


class Factors(NamedTuple):
    """The matrices of an adapter for one stored weight of a layer."""

    a: Tensor
    """[rank, inputs]"""
    b: Tensor
    """[all outputs of the layer, rank]; only the rows of this weight's runs are read."""
    scale: float


@dataclass(frozen=True, slots=True)
class LoRAShape:
    """The sizes of one layer."""

    inputs: int
    outputs: int
    runs: tuple[Run, ...]
    num_slots: int
    """Slots are numbered from 1; the slot 0 of a row means that it has no adapter."""
    dtype: torch.dtype
    """Type of A and B, float32 or bfloat16."""


class PackedFactors(NamedTuple):
    """An adapter's part for one layer, in the form that computes best."""

    tensors: tuple[Tensor, ...]
    """All tensors that it holds."""
    detail: Any

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.tensors)


class SlotLinear(ABC):
    """The adapters of one layer, in slots. `ops.slot_linear(shape)` makes one whose slots are empty."""

    stays = True
    """Whether recorded launches see what `set` changes."""

    def __init__(self, shape: LoRAShape) -> None:
        self.shape = shape

    @abstractmethod
    def pack(self, factors: Sequence[Factors | None]) -> PackedFactors:
        """Prepare the matrices of one adapter, one for each source; None where it leaves the source as it is."""

    @abstractmethod
    def set(self, slot: int, packed: PackedFactors | None) -> None:
        """Put the result of this layer's `pack` into a slot; None for an adapter that does not change the layer."""

    @abstractmethod
    def __call__(self, x: Tensor, slot_of_row: Tensor, room: Tensor) -> Tensor:
        """x [rows, inputs], slot_of_row int32 [rows] → the addend, float32 [rows, outputs].

        It is zero for rows without adapter. A row has the same bits whatever its neighbours are. room: float32 of at
        least rows · outputs elements, in which the addend may be returned.
        """


class PlainSlots(SlotLinear):
    """The reference in plain torch."""

    def __init__(self, shape: LoRAShape) -> None:
        super().__init__(shape)
        self._slots: dict[int, Sequence[Factors | None]] = {}

    def pack(self, factors: Sequence[Factors | None]) -> PackedFactors:
        kept = [None if each is None else Factors(each.a.clone(), each.b.clone(), each.scale) for each in factors]
        return PackedFactors(tuple(tensor for each in kept if each is not None for tensor in each[:2]), kept)

    def set(self, slot: int, packed: PackedFactors | None) -> None:
        self._slots[slot] = [] if packed is None else packed.detail

    def __call__(self, x: Tensor, slot_of_row: Tensor, room: Tensor) -> Tensor:
        add = x.new_zeros((len(x), self.shape.outputs), dtype=torch.float32)
        for slot in set(slot_of_row.tolist()):
            rows = (slot_of_row == slot).nonzero()[:, 0]
            for source, factors in enumerate(self._slots.get(slot, ())):
                if factors is None:
                    continue
                hidden = linear(x[rows].float(), factors.a.float()) * factors.scale
                for start, length, own in self.shape.runs:
                    if own == source:
                        outputs = slice(start, start + length)
                        add[rows, outputs] = linear(hidden, factors.b[outputs].float())
        return add


def examples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Yield (shape, x, slot_of_row, adapters): mixes of slots, ranks and sources, base rows, widths that are no whole
    tiles."""
    generator = torch.Generator().manual_seed(0)

    held = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32

    def random(sizes: tuple[int, ...], kind: torch.dtype = held) -> Tensor:
        values: Tensor = torch.randn(sizes, generator=generator) / sizes[-1] ** 0.5
        return values.to(kind)

    runs = (Run(0, 40, 0), Run(40, 24, 1), Run(64, 7, 0))
    for rows, inputs, outputs, own in ((1, 48, 40, runs[:1]), (9, 70, 71, runs), (150, 129, 71, runs)):
        num_sources = len({run.source for run in own})
        adapters = [
            [
                None if rank == 5 and source else Factors(random((rank, inputs)), random((outputs, rank)), 1.5)
                for source in range(num_sources)
            ]
            for rank in (8, 5, 17)
        ]
        slots = torch.randint(0, 4, (rows,), generator=generator, dtype=torch.int32)
        yield LoRAShape(inputs, outputs, own, 3, held), random((rows, inputs), dtype), slots, adapters


def trial(
    make: Any, shape: LoRAShape, x: Tensor, slot_of_row: Tensor, adapters: Sequence[Sequence[Factors | None]]
) -> Tensor:
    """Return the addend of one list of `examples`."""
    made: SlotLinear = make(shape)
    for slot, factors in enumerate(adapters, start=1):
        made.set(slot, made.pack(factors))
    return made(x, slot_of_row, torch.empty(len(x) * shape.outputs))


OPERATORS = (Operator("slot_linear", PlainSlots, examples, trial=trial),)
