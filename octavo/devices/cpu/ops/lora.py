"""What adapters add to products, by one kernel for all slots of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.devices.cpu.ops.linear import PANEL_COLUMNS
from octavo.devices.cpu.runtime import TYPE_CODES, CpuRuntime, rows_of
from octavo.ops.lora import Factors, LoRAShape, PackedFactors, SlotLinear
from octavo.ops.registry import Implementation


class TableSlots(SlotLinear):
    """Slots in a table of addresses that the kernel reads, so that a recorded call computes with what is there now.

    The line of a slot has the words of `LoraSlot` and of a `LoraRun` for each run (`csrc/cpu/lora/lora.h`).
    """

    def __init__(self, runtime: CpuRuntime, shape: LoRAShape) -> None:
        super().__init__(shape)
        self._kernel = runtime.cpu.add_adapters
        self._table = torch.zeros((shape.num_slots + 1, 3 * (1 + len(shape.runs))), dtype=torch.int64)
        self._outputs = torch.tensor([run[:2] for run in shape.runs], dtype=torch.int64)
        addresses = self._table.data_ptr(), self._outputs.data_ptr()
        self._fixed = (shape.outputs, shape.inputs, TYPE_CODES[shape.dtype], *addresses, len(shape.runs))
        self._kept: dict[int, PackedFactors | None] = {}

    def pack(self, factors: Sequence[Factors | None]) -> PackedFactors:
        held = [each for each in factors if each is not None]
        a = torch.cat([each.a for each in held])
        scales = torch.cat([torch.full((len(each.a),), each.scale) for each in held])
        tensors, words, first = [a, scales], [a.data_ptr(), scales.data_ptr(), len(a)], [0]
        for each in factors:
            first.append(first[-1] + (0 if each is None else len(each.a)))
        for start, length, source in self.shape.runs:
            own = factors[source]
            if own is None:
                words += [0, 0, 0]
                continue
            rows = F.pad(own.b[start : start + length], (0, 0, 0, -length % PANEL_COLUMNS))
            panels = rows.view(-1, PANEL_COLUMNS, rows.shape[1]).transpose(1, 2).contiguous()
            tensors.append(panels)
            words += [panels.data_ptr(), first[source], rows.shape[1]]
        return PackedFactors(tuple(tensors), words)

    def set(self, slot: int, packed: PackedFactors | None) -> None:
        self._kept[slot] = packed
        self._table[slot] = 0 if packed is None else torch.tensor(packed.detail)

    def __call__(self, x: Tensor, slot_of_row: Tensor, room: Tensor) -> Tensor:
        x = x.float() if x.dtype is torch.float16 else x
        rows, inputs, stride = rows_of(x)
        assert inputs == self.shape.inputs, f"x has {inputs} columns, its adapters {self.shape.inputs} inputs"
        assert slot_of_row.shape == (rows,), f"{rows} rows have {len(slot_of_row)} slots"
        add = room[: rows * self.shape.outputs].view(rows, self.shape.outputs)
        slots, own = slot_of_row.data_ptr(), TYPE_CODES[x.dtype]
        self._kernel(x.data_ptr(), stride, rows, own, slots, add.data_ptr(), *self._fixed)
        return add


IMPLEMENTATIONS = (Implementation("slot_linear", "native", lambda runtime: partial(TableSlots, runtime)),)
