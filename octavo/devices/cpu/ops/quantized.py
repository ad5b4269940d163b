"""Linear layers with codes as weights, in panels of 32 output columns: quantised here, or as a checkpoint has them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.devices.cpu.ops.experts import PanelStack
from octavo.devices.cpu.ops.linear import PANEL_COLUMNS, Panels, addend, bias_spec, num_panels, panel_order
from octavo.devices.cpu.runtime import FLOAT_TYPES, TYPE_CODES, CpuRuntime, dense, rows_of
from octavo.ops.coded import CodedFormat, CodeSpec
from octavo.ops.codes import NotFinite, check_inputs
from octavo.ops.experts import PreparedStack
from octavo.ops.prepare_linear import LinearShape, PreparedLinear, TensorSpec
from octavo.ops.prepare_quantized import QuantizedFormat
from octavo.ops.registry import Implementation

_SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
_ZEROS = ("none", "zeros", "minimums")
_STEP = 64
_TILE_COLUMNS = 16
_PACKED_BYTES = 32 << 20
"""Bytes of codes that are packed into panels at once."""


def format_code(spec: CodeSpec) -> int:
    """Return the number of a format: `CodeFormat` of csrc/cpu/quantized/quantized.h."""
    kind = 2 if spec.bits == 8 else int(spec.is_float)
    scales, zero = _SCALES.index(spec.scale_dtype), _ZEROS.index(spec.zero)
    return kind | scales << 2 | zero << 4 | (spec.activation_bits == 16) << 6 | spec.group << 8


class QuantizedPanels(Panels):
    """State: `panels` as csrc/cpu/quantized has them, `order` where inputs have one, `bias` in the panels' order."""

    def __init__(self, runtime: CpuRuntime, spec: CodeSpec, shape: LinearShape, state: Mapping[str, Tensor]) -> None:
        super().__init__(runtime, shape, state)
        self._linear, self._rows = runtime.cpu.quantized_linear, runtime.cpu.quantized_rows
        addresses = [state[name].data_ptr() if name in state else 0 for name in ("panels", "order", "bias")]
        sizes = (shape.outputs, shape.inputs, format_code(spec), shape.is_gated)
        self._for_rows = (*addresses[:2], *sizes)
        self._for_linear = (*addresses, *sizes)

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """Compute types other than float32 and bfloat16 in float32."""
        if x.dtype not in FLOAT_TYPES:
            return self._product(x.float(), torch.float32, add).to(x.dtype)
        return self._product(x, x.dtype, add)

    def in_float32(self, x: Tensor) -> Tensor:
        return self._product(x if x.dtype in FLOAT_TYPES else x.float(), torch.float32, None)

    def write(self, x: Tensor, out: Tensor, add: Tensor | None = None) -> None:
        if x.dtype not in FLOAT_TYPES or out.dtype not in FLOAT_TYPES:
            super().write(x, out, add)
            return
        rows, inputs, stride = rows_of(x)
        assert inputs == self.shape.inputs, f"x has {inputs} columns, its weight {self.shape.inputs} inputs"
        result = (out.data_ptr(), out.stride(0), TYPE_CODES[out.dtype])
        more = addend(add, rows, self.shape.outputs)
        self._linear(x.data_ptr(), stride, rows, TYPE_CODES[x.dtype], *result, *self._for_linear, *more)

    def rows(self, ids: Tensor) -> Tensor:
        """Raise IndexError for a number that is no row's."""
        dtype = self.shape.dtype if self.shape.dtype in FLOAT_TYPES else torch.float32
        ids = dense(ids)
        out = self._empty((ids.shape[0], self.shape.inputs), dtype)
        self._rows(ids.data_ptr(), ids.shape[0], out.data_ptr(), TYPE_CODES[dtype], *self._for_rows)
        return out.to(self.shape.dtype)


class CodedPanels(CodedFormat):
    """Packs stored codes."""

    order_of_bytes = "panels/2"

    def __init__(self, runtime: CpuRuntime, spec: CodeSpec) -> None:
        super().__init__(spec)
        self._runtime = runtime

    def state_specs(self, shape: LinearShape) -> dict[str, TensorSpec]:
        check_inputs(shape.inputs)
        panel_bytes = self._runtime.cpu.quantized_panel_bytes(shape.inputs, format_code(self.spec))
        specs = {"panels": TensorSpec((num_panels(shape), panel_bytes), torch.uint8)}
        if self.spec.has_order:
            specs["order"] = TensorSpec((shape.inputs,), torch.int32)
        return {**specs, **bias_spec(shape)}

    def zeros(self, spec: TensorSpec, device: torch.device | str) -> Tensor:
        """Take memory of the runtime's arena."""
        return self._runtime.weights.zeroed(spec.shape, spec.dtype)

    def pack_into(
        self, state: Mapping[str, Tensor], weight: Mapping[str, Tensor], bias: Tensor | None, *, gated: bool
    ) -> None:
        self.spec.check(weight)
        if bias is not None:
            state["bias"].copy_(panel_order(bias, gated))
        if self.spec.has_order:
            state["order"].copy_(weight["order"])
        outputs, inputs = weight["codes"].shape
        panels = state["panels"]
        # where each column of the panels comes from; what fills the last one repeats the first row
        columns = panel_order(torch.arange(outputs), gated).long().view(len(panels), PANEL_COLUMNS)
        together = max(1, _PACKED_BYTES // (PANEL_COLUMNS * inputs))
        for start in range(0, len(panels), together):
            rows = columns[start : start + together].flatten()
            own = {name: tensor[rows] for name, tensor in weight.items() if name != "order"}
            _pack(self.spec, own, panels[start : start + together])

    def restore(self, shape: LinearShape, state: Mapping[str, Tensor]) -> PreparedLinear:
        return QuantizedPanels(self._runtime, self.spec, shape, state)

    def restore_stack(self, shape: LinearShape, state: Mapping[str, Tensor], first: int = 0) -> PreparedStack:
        return PanelStack(self._runtime, shape, state, first, format_code(self.spec))


def _pack(spec: CodeSpec, weight: Mapping[str, Tensor], panels: Tensor) -> None:
    """Write codes and scales of rows in the order of the columns to panels [panels, bytes]."""
    inputs = weight["codes"].shape[1]
    block = spec.super_group or spec.group
    depth = -(-inputs // max(block, _STEP)) * max(block, _STEP)
    group = spec.group or depth
    block, unit = block or depth, min(group, _STEP)
    blocks = panels.view(len(panels), depth // block, -1)

    offset = 0 if spec.is_float or spec.zero != "none" else 2 ** (spec.bits - 1)
    codes = F.pad(weight["codes"].view(torch.uint8) + offset, (0, depth - inputs))
    # [panels, half, column, block, unit, quad of inputs], a quad in 32 bits
    quads = codes.view(torch.int32).view(len(panels), 2, _TILE_COLUMNS, depth // block, block // unit, unit // 4)
    if spec.bits == 4:
        nibbles = quads & 0x0F0F0F0F
        lines = (nibbles[:, 0] | nibbles[:, 1] << 4).permute(0, 2, 3, 4, 1)
    else:
        lines = quads.permute(0, 3, 4, 1, 5, 2)
    # of two levels, two groups at a time; factors end the block
    runs = block // (2 * group) if spec.super_group else 1
    at, end = block * PANEL_COLUMNS * spec.bits // 8 // runs, blocks.shape[-1]
    if spec.super_group:
        end -= 2 * PANEL_COLUMNS * (1 + (spec.zero == "minimums"))
    together = blocks[..., :end].view(*blocks.shape[:2], runs, -1)
    lines = lines.view(*lines.shape[:2], runs, -1, *lines.shape[3:])
    together[..., :at].view(torch.int32).view(lines.shape).copy_(lines)
    for name in ("scales", "zeros", "minimums", "super_scales", "super_minimums"):
        if name not in weight:
            continue
        span = spec.super_group if name.startswith("super") else group
        values = weight[name] * 0.5 if spec.is_float else weight[name]
        values = F.pad(values, (0, depth // span - values.shape[1]))
        values = values.view(len(panels), PANEL_COLUMNS, len(blocks[0]), -1).permute(0, 2, 3, 1).contiguous()
        found = values.view(torch.uint8)
        if name.startswith("super"):
            found = found.flatten(2)
            blocks[..., end : end + found.shape[-1]].copy_(found)
            end += found.shape[-1]
        else:
            found = found.reshape(*together.shape[:3], -1)
            together[..., at : at + found.shape[-1]].copy_(found)
            at += found.shape[-1]
    assert (at, end) == (together.shape[-1], blocks.shape[-1]), f"{at} bytes of groups, {end} of a block were written"


class QuantizedPanelFormat(QuantizedFormat):
    """Quantises on the runtime's threads."""

    def __init__(self, runtime: CpuRuntime, spec: CodeSpec) -> None:
        super().__init__(spec, partial(CodedPanels, runtime))
        self._runtime = runtime

    def pack_into(self, state: Mapping[str, Tensor], weight: Tensor, bias: Tensor | None, *, gated: bool) -> None:
        """Raise NotFinite for a weight with NaN or infinities."""
        outputs, inputs = weight.shape
        plain = weight if weight.dtype in FLOAT_TYPES else weight.float()
        plain = plain if plain.stride(1) == 1 else dense(plain)
        if bias is not None:
            state["bias"].copy_(panel_order(bias, gated))
        source = (plain.data_ptr(), rows_of(plain)[2], TYPE_CODES[plain.dtype])
        sizes = (outputs, inputs, format_code(self.spec), gated)
        spoilt_row = self._runtime.cpu.quantized_pack(*source, state["panels"].data_ptr(), *sizes)
        if spoilt_row >= 0:
            raise NotFinite(spoilt_row)


IMPLEMENTATIONS = (
    Implementation("prepare_quantized", "native", lambda runtime: partial(QuantizedPanelFormat, runtime)),
    Implementation("prepare_coded", "native", lambda runtime: partial(CodedPanels, runtime)),
)
