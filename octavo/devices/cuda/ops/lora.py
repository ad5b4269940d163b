"""What adapters add to products: two products with the matrices of all slots beside each other."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from octavo.devices.cuda.ops.linear import MIDDLE, multiplied
from octavo.devices.cuda.runtime import CudaRuntime
from octavo.ops.lora import LoRAShape, PackedFactors, PlainSlots
from octavo.ops.registry import Implementation


class StackedSlots(PlainSlots):
    """All A on top of each other and all B side by side. Between the two products a row keeps what is of its own slot.

    A rank takes whole steps of the products' sums: so what a row gets does not depend on the number of its slot.
    """

    stays = False

    def __init__(self, runtime: CudaRuntime, shape: LoRAShape) -> None:
        super().__init__(shape)
        self._runtime = runtime
        self._stacked: tuple[Tensor, Tensor, Tensor] | None = None
        """A [width, inputs], scale · B [outputs, width], and the slots of the width, int32; None after a change."""

    def set(self, slot: int, packed: PackedFactors | None) -> None:
        super().set(slot, packed)
        self._stacked = None

    def __call__(self, x: Tensor, slot_of_row: Tensor, room: Tensor) -> Tensor:
        if self._stacked is None:
            self._stacked = self._stack(x.device)
        a, b, slots = self._stacked
        hidden = multiplied(self._runtime, x, {"weight": a}, torch.float32)
        hidden = hidden.masked_fill(slot_of_row[:, None] != slots, 0.0)
        return multiplied(self._runtime, hidden, {"weight": b}, torch.float32)

    def _stack(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        shape, step = self.shape, MIDDLE["BK"]
        parts = [
            (slot, source, each)
            for slot, factors in self._slots.items()
            for source, each in enumerate(factors)
            if each is not None
        ]
        widths = [-(-len(each.a) // step) * step for _, _, each in parts]
        a = torch.zeros((sum(widths, 0) or step, shape.inputs), dtype=shape.dtype)
        b = torch.zeros((shape.outputs, len(a)))
        slots = torch.zeros(len(a), dtype=torch.int32)
        first = 0
        for (slot, source, each), width in zip(parts, widths, strict=True):
            rank = len(each.a)
            a[first : first + rank] = each.a
            slots[first : first + width] = slot
            for start, length, own in shape.runs:
                if own == source:
                    outputs = slice(start, start + length)
                    b[outputs, first : first + rank] = each.b[outputs].float() * each.scale
            first += width
        return a.to(device), b.to(device), slots.to(device)


IMPLEMENTATIONS = (Implementation("slot_linear", "triton", lambda runtime: partial(StackedSlots, runtime)),)
