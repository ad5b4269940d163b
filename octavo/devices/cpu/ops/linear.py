"""Linear layers whose weights, in bfloat16 or float32, are packed into panels of 32 output columns.

The panels (`csrc/cpu/panels.h`, `csrc/cpu/linear/linear.h`) serve every instruction set; rows of the plain weight are
read back from them, so that a tied embedding is kept once.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from octavo.devices.cpu.ops.experts import PanelStack
from octavo.devices.cpu.runtime import TYPE_CODES, CpuRuntime, dense, rows_of
from octavo.ops.experts import PreparedStack
from octavo.ops.prepare_linear import LinearFormat, LinearShape, PlainFormat, PreparedLinear, TensorSpec
from octavo.ops.registry import Implementation

PANEL_COLUMNS = 32
_GATED_COLUMNS = 16  # of gate in a panel, beside as many of up
_STEP_INPUTS = {torch.bfloat16: 32, torch.float32: 1}


def num_panels(shape: LinearShape) -> int:
    """Return how many panels the columns of a weight fill."""
    return -(-shape.outputs // PANEL_COLUMNS) if not shape.is_gated else -(-(shape.outputs // 2) // _GATED_COLUMNS)


def bias_spec(shape: LinearShape) -> dict[str, TensorSpec]:
    """Return the spec of the bias in the order of the panels, where the weight has one."""
    return {"bias": TensorSpec((num_panels(shape) * PANEL_COLUMNS,), torch.float32)} if shape.has_bias else {}


def panel_order(bias: Tensor, gated: bool) -> Tensor:
    """Return bias [outputs] as float32 [panels · 32], a value for each column of the panels."""
    width = _GATED_COLUMNS if gated else PANEL_COLUMNS
    halves = bias.float().view(2, -1) if gated else bias.float().view(1, -1)
    padded = torch.nn.functional.pad(halves, (0, -halves.shape[1] % width))
    return padded.view(halves.shape[0], -1, width).transpose(0, 1).reshape(-1)


def addend(add: Tensor | None, rows: int, outputs: int) -> tuple[int, ...]:
    """Return the arguments of kernels for the addend of a product: (address, elements from row to row), or none."""
    if add is None:
        return ()
    assert add.dtype is torch.float32, f"an addend is {add.dtype}, expected float32"
    assert add.shape == (rows, outputs), f"an addend has shape {list(add.shape)}, expected {[rows, outputs]}"
    return add.data_ptr(), rows_of(add)[2]


class Panels(PreparedLinear):
    """A weight whose products are written to memory of the runtime."""

    def __init__(self, runtime: CpuRuntime, shape: LinearShape, state: Mapping[str, Tensor]) -> None:
        super().__init__(shape, state)
        self._empty = runtime.empty
        self._columns = shape.columns

    def _product(self, x: Tensor, dtype: torch.dtype, add: Tensor | None) -> Tensor:
        out = self._empty((x.shape[0], self._columns), dtype)
        self.write(x, out, add)
        return out


class PanelLinear(Panels):
    """State: `panels` [panels, elements], and `bias` float32 [panels · 32] where there is one."""

    def __init__(self, runtime: CpuRuntime, shape: LinearShape, state: Mapping[str, Tensor]) -> None:
        super().__init__(runtime, shape, state)
        self._multiply = runtime.cpu.linear
        self._rows = runtime.cpu.linear_rows
        self._by_head = runtime.cpu.linear_by_head
        bias = state["bias"].data_ptr() if "bias" in state else 0
        code = TYPE_CODES[shape.dtype]
        self._weight = (state["panels"].data_ptr(), bias, shape.outputs, shape.inputs, code, shape.is_gated)

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        return self._product(x, x.dtype, add)

    def in_float32(self, x: Tensor) -> Tensor:
        """Return the sums as they are."""
        return self._product(x, torch.float32, None)

    def write(self, x: Tensor, out: Tensor, add: Tensor | None = None) -> None:
        rows, inputs, stride = rows_of(x)
        shape = self.shape
        assert x.dtype is shape.dtype, f"x is {x.dtype}, its weight {shape.dtype}"
        assert inputs == shape.inputs, f"x has {inputs} columns, its weight {shape.inputs} inputs"
        result = (out.data_ptr(), out.stride(0), TYPE_CODES[out.dtype])
        self._multiply(x.data_ptr(), stride, rows, *self._weight, *result, *addend(add, rows, shape.outputs))

    def by_head(self, x: Tensor, outputs: int) -> Tensor:
        (tokens, heads, inputs), stride = x.shape, x.stride(0)
        assert x.stride()[1:] == (inputs, 1), "heads of a token lie side by side"
        panels, _, _, _, code, _ = self._weight
        out = self._empty((tokens, heads, outputs), x.dtype)
        self._by_head(x.data_ptr(), stride, tokens, panels, heads, outputs, inputs, code, out.data_ptr())
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """Raise IndexError for a number that is no row's."""
        ids = dense(ids)
        out = self._empty((ids.shape[0], self.shape.inputs), self.shape.dtype)
        self._rows(ids.data_ptr(), ids.shape[0], out.data_ptr(), *self._weight)
        return out


class PanelFormat(LinearFormat):
    """Packs weights in bfloat16 and float32 into panels; keeps those of other types plain."""

    layout = "panels/1"

    def __init__(self, runtime: CpuRuntime) -> None:
        self._runtime = runtime
        self._plain = PlainFormat()

    def zeros(self, spec: TensorSpec, device: torch.device | str) -> Tensor:
        """Take memory of the runtime's arena."""
        return self._runtime.weights.zeroed(spec.shape, spec.dtype)

    def pack_into(self, state: Mapping[str, Tensor], weight: Tensor, bias: Tensor | None, *, gated: bool) -> None:
        """Pack on the runtime's threads."""
        if weight.dtype not in _STEP_INPUTS:
            self._plain.pack_into(state, weight, bias, gated=gated)
            return
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        if bias is not None:
            state["bias"].copy_(panel_order(bias, gated))
        self._runtime.cpu.linear_pack(
            *(weight.data_ptr(), weight.stride(0), state["panels"].data_ptr()),
            *(*weight.shape, TYPE_CODES[weight.dtype], gated),
        )

    def state_specs(self, shape: LinearShape) -> dict[str, TensorSpec]:
        if shape.dtype not in _STEP_INPUTS:
            return self._plain.state_specs(shape)
        step = _STEP_INPUTS[shape.dtype]
        elements = -(-shape.inputs // step) * step * PANEL_COLUMNS
        return {"panels": TensorSpec((num_panels(shape), elements), shape.dtype), **bias_spec(shape)}

    def restore(self, shape: LinearShape, state: Mapping[str, Tensor]) -> PreparedLinear:
        if shape.dtype not in _STEP_INPUTS:
            return self._plain.restore(shape, state)
        return PanelLinear(self._runtime, shape, state)

    def restore_stack(self, shape: LinearShape, state: Mapping[str, Tensor], first: int = 0) -> PreparedStack:
        if shape.dtype not in _STEP_INPUTS:
            return self._plain.restore_stack(shape, state, first)
        return PanelStack(self._runtime, shape, state, first)


IMPLEMENTATIONS = (Implementation("prepare_linear", "native", PanelFormat),)
