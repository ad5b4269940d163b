"""Linear layers with quantised weights, in panels of 32 output columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from octavo.devices.cpu.ops.linear import PANEL_COLUMNS, num_panels, panel_order
from octavo.devices.cpu.runtime import TYPE_CODES, CpuRuntime, availability, dense, rows_of
from octavo.ops.codes import NotFinite, check_inputs
from octavo.ops.prepare_linear import LinearFormat, LinearShape, PreparedLinear, TensorSpec
from octavo.ops.registry import Implementation

_STEP = 64
_TYPES = (torch.float32, torch.bfloat16)


class PanelLinear(PreparedLinear):
    """`panels` as csrc/cpu/quantized has them; `group` is 0 for int8, which has a scale per column beside them."""

    def __init__(self, runtime: CpuRuntime, group: int, shape: LinearShape, state: Mapping[str, Tensor]) -> None:
        self.shape = shape
        self._state = dict(state)
        self._runtime = runtime
        self._linear, self._rows = runtime.cpu.quantized_linear, runtime.cpu.quantized_rows
        addresses = [self._state[name].data_ptr() if name in state else 0 for name in ("panels", "scales", "bias")]
        sizes = (shape.outputs, shape.inputs, group, shape.is_gated)
        self._for_rows = (*addresses[:2], *sizes)
        self._for_linear = (*addresses, *sizes)
        self._columns = shape.outputs // 2 if shape.is_gated else shape.outputs

    def __call__(self, x: Tensor) -> Tensor:
        """See `PreparedLinear`. Types other than float32 and bfloat16 go through float32."""
        if x.dtype not in _TYPES:
            return self._multiply(x.float(), torch.float32).to(x.dtype)
        return self._multiply(x, x.dtype)

    def in_float32(self, x: Tensor) -> Tensor:
        """See `PreparedLinear.in_float32`."""
        return self._multiply(x if x.dtype in _TYPES else x.float(), torch.float32)

    def _multiply(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        tokens, inputs, stride = rows_of(x)
        assert inputs == self.shape.inputs, f"x has {inputs} columns, its weight {self.shape.inputs} inputs"
        out = self._runtime.empty((tokens, self._columns), dtype)
        code = TYPE_CODES[x.dtype]
        self._linear(
            x.data_ptr(), stride, tokens, code, out.data_ptr(), self._columns, TYPE_CODES[dtype], *self._for_linear
        )
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """See `PreparedLinear.rows`. Raises IndexError for a number that is no row's."""
        dtype = self.shape.dtype if self.shape.dtype in _TYPES else torch.float32
        ids = dense(ids)
        out = self._runtime.empty((ids.shape[0], self.shape.inputs), dtype)
        self._rows(ids.data_ptr(), ids.shape[0], out.data_ptr(), TYPE_CODES[dtype], *self._for_rows)
        return out.to(self.shape.dtype)

    def state(self) -> dict[str, Tensor]:
        """`panels`; int8's `scales` and a `bias`, both float32 in the panels' order."""
        return dict(self._state)


class PanelFormat:
    """Quantises on the runtime's threads. See `LinearFormat`."""

    def __init__(self, runtime: CpuRuntime, group: int = 0) -> None:
        self._runtime = runtime
        self._group = group
        self.layout = f"int4-g{group}-panels/1" if group else "int8-panels/1"

    def __call__(self, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> PreparedLinear:
        """See `LinearFormat`. Raises NotFinite."""
        outputs, inputs = weight.shape
        shape = LinearShape(outputs, inputs, weight.dtype, bias is not None, gated)
        plain = weight if weight.dtype in _TYPES else weight.float()
        plain = plain if plain.stride(1) == 1 else dense(plain)
        zeroed = self._runtime.weights.zeroed
        state = {name: zeroed(spec.shape, spec.dtype) for name, spec in self.state_specs(shape).items()}
        if bias is not None:
            state["bias"].copy_(panel_order(bias, gated))
        spoilt_row = self._runtime.cpu.quantized_pack(
            plain.data_ptr(),
            rows_of(plain)[2],
            TYPE_CODES[plain.dtype],
            state["panels"].data_ptr(),
            state["scales"].data_ptr() if "scales" in state else 0,
            outputs,
            inputs,
            self._group,
            gated,
        )
        if spoilt_row >= 0:
            raise NotFinite(spoilt_row)
        return self.restore(shape, state)

    def state_specs(self, shape: LinearShape) -> dict[str, TensorSpec]:
        """See `LinearFormat.state_specs`. Raises ConfigError for a weight that is too wide."""
        check_inputs(shape.inputs)
        panels, depth = num_panels(shape), _depth(shape.inputs, self._group)
        lanes = panels * PANEL_COLUMNS
        if self._group:
            per_panel = depth // self._group * (self._group * PANEL_COLUMNS // 2 + 2 * PANEL_COLUMNS)
            specs = {"panels": TensorSpec((panels, per_panel), torch.uint8)}
        else:
            specs = {
                "panels": TensorSpec((panels, depth * PANEL_COLUMNS), torch.uint8),
                "scales": TensorSpec((lanes,), torch.float32),
            }
        return {**specs, "bias": TensorSpec((lanes,), torch.float32)} if shape.has_bias else specs

    def restore(self, shape: LinearShape, state: Mapping[str, Tensor]) -> PreparedLinear:
        """See `LinearFormat.restore`."""
        return PanelLinear(self._runtime, self._group, shape, state)


def _depth(inputs: int, group: int) -> int:
    """Inputs with the zeros that fill the last step, or the last group."""
    step = group or _STEP
    return -(-inputs // step) * step


def _make(group: int, runtime: CpuRuntime) -> LinearFormat:
    return PanelFormat(runtime, group)


_FORMATS: tuple[tuple[str, Callable[[CpuRuntime], LinearFormat]], ...] = (
    ("prepare_int8", partial(_make, 0)),
    ("prepare_int4", partial(_make, 64)),
    ("prepare_int4_g128", partial(_make, 128)),
)

IMPLEMENTATIONS = tuple(Implementation(operator, "native", make, availability) for operator, make in _FORMATS)
