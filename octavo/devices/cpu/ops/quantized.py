"""Linear layers with quantised weights, in panels of 32 output columns."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from octavo.devices.cpu.ops.experts import PanelStack
from octavo.devices.cpu.ops.linear import PANEL_COLUMNS, addend, bias_spec, num_panels, panel_order
from octavo.devices.cpu.runtime import TYPE_CODES, CpuRuntime, dense, rows_of
from octavo.ops.codes import NotFinite, check_inputs
from octavo.ops.experts import PreparedStack
from octavo.ops.prepare_linear import LinearShape, PreparedLinear, TensorSpec
from octavo.ops.registry import Implementation

_STEP = 64
_TYPES = (torch.float32, torch.bfloat16)


class QuantizedPanels(PreparedLinear):
    """State: `panels` as csrc/cpu/quantized has them; `scales` of int8 and a `bias`, both float32 in the panels' order.

    `group` inputs share a scale; it is 0 for int8, which has a scale per column.
    """

    def __init__(self, runtime: CpuRuntime, group: int, shape: LinearShape, state: Mapping[str, Tensor]) -> None:
        super().__init__(shape, state)
        self._empty = runtime.empty
        self._linear, self._rows = runtime.cpu.quantized_linear, runtime.cpu.quantized_rows
        addresses = [state[name].data_ptr() if name in state else 0 for name in ("panels", "scales", "bias")]
        sizes = (shape.outputs, shape.inputs, group, shape.is_gated)
        self._for_rows = (*addresses[:2], *sizes)
        self._for_linear = (*addresses, *sizes)
        self._columns = shape.outputs // 2 if shape.is_gated else shape.outputs

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """Compute types other than float32 and bfloat16 in float32."""
        if x.dtype not in _TYPES:
            return self._product(x.float(), torch.float32, add).to(x.dtype)
        return self._product(x, x.dtype, add)

    def in_float32(self, x: Tensor) -> Tensor:
        return self._product(x if x.dtype in _TYPES else x.float(), torch.float32, None)

    def _product(self, x: Tensor, dtype: torch.dtype, add: Tensor | None) -> Tensor:
        rows, inputs, stride = rows_of(x)
        assert inputs == self.shape.inputs, f"x has {inputs} columns, its weight {self.shape.inputs} inputs"
        out = self._empty((rows, self._columns), dtype)
        result = (out.data_ptr(), self._columns, TYPE_CODES[dtype])
        more = addend(add, rows, self.shape.outputs)
        self._linear(x.data_ptr(), stride, rows, TYPE_CODES[x.dtype], *result, *self._for_linear, *more)
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """Raise IndexError for a number that is no row's."""
        dtype = self.shape.dtype if self.shape.dtype in _TYPES else torch.float32
        ids = dense(ids)
        out = self._empty((ids.shape[0], self.shape.inputs), dtype)
        self._rows(ids.data_ptr(), ids.shape[0], out.data_ptr(), TYPE_CODES[dtype], *self._for_rows)
        return out.to(self.shape.dtype)


class QuantizedFormat:
    """Quantises on the runtime's threads. See `LinearFormat`."""

    def __init__(self, group: int, runtime: CpuRuntime) -> None:
        self._runtime = runtime
        self._group = group
        self.layout = f"int4-g{group}-panels/1" if group else "int8-panels/1"

    def __call__(self, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> PreparedLinear:
        """Raise NotFinite for a weight with NaN or infinities."""
        outputs, inputs = weight.shape
        shape = LinearShape(outputs, inputs, weight.dtype, bias is not None, gated)
        state = {name: self.zeros(spec, weight.device) for name, spec in self.state_specs(shape).items()}
        self.pack_into(state, weight, bias, gated=gated)
        return self.restore(shape, state)

    def zeros(self, spec: TensorSpec, device: torch.device | str) -> Tensor:
        """Take memory of the runtime's arena."""
        return self._runtime.weights.zeroed(spec.shape, spec.dtype)

    def pack_into(self, state: Mapping[str, Tensor], weight: Tensor, bias: Tensor | None, *, gated: bool) -> None:
        """Raise NotFinite for a weight with NaN or infinities."""
        outputs, inputs = weight.shape
        plain = weight if weight.dtype in _TYPES else weight.float()
        plain = plain if plain.stride(1) == 1 else dense(plain)
        if bias is not None:
            state["bias"].copy_(panel_order(bias, gated))
        source = (plain.data_ptr(), rows_of(plain)[2], TYPE_CODES[plain.dtype])
        target = (state["panels"].data_ptr(), state["scales"].data_ptr() if "scales" in state else 0)
        spoilt_row = self._runtime.cpu.quantized_pack(*source, *target, outputs, inputs, self._group, gated)
        if spoilt_row >= 0:
            raise NotFinite(spoilt_row)

    def state_specs(self, shape: LinearShape) -> dict[str, TensorSpec]:
        """Raise ConfigError for a weight that is too wide."""
        check_inputs(shape.inputs)
        # the last step of inputs, or the last group, is filled with zeros
        panels, step = num_panels(shape), self._group or _STEP
        steps = -(-shape.inputs // step)
        if self._group:
            per_step = step * PANEL_COLUMNS // 2 + 2 * PANEL_COLUMNS
            specs = {"panels": TensorSpec((panels, steps * per_step), torch.uint8)}
        else:
            specs = {
                "panels": TensorSpec((panels, steps * step * PANEL_COLUMNS), torch.uint8),
                "scales": TensorSpec((panels * PANEL_COLUMNS,), torch.float32),
            }
        return {**specs, **bias_spec(shape)}

    def restore(self, shape: LinearShape, state: Mapping[str, Tensor]) -> PreparedLinear:
        return QuantizedPanels(self._runtime, self._group, shape, state)

    def restore_stack(self, shape: LinearShape, state: Mapping[str, Tensor], first: int = 0) -> PreparedStack:
        return PanelStack(self._runtime, shape, state, first, self._group)


IMPLEMENTATIONS = tuple(
    Implementation(operator, "native", partial(QuantizedFormat, group))
    for operator, group in (("prepare_int8", 0), ("prepare_int4", 64), ("prepare_int4_g128", 128))
)
