"""Checkpoints of bitsandbytes: NF4 and FP4, which are dequantised, and LLM.int8, whose codes stay as they are.

Blocks of 4-bit codes run over the flattened weight. Format: https://github.com/bitsandbytes-foundation/bitsandbytes.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from octavo.config.section import Section
from octavo.errors import CheckpointError
from octavo.ops.coded import CodeSpec
from octavo.quantization.stored import (
    ALL,
    Part,
    Parts,
    StoredFormat,
    StoredWeight,
    expect_shape,
    finite,
    is_skipped,
    names_in,
    needed,
    rows_of,
    scales_of,
    sizes_of,
)

_STATES = (".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4")
_INT8 = CodeSpec(8, 0, "none", torch.float32)


class BitsAndBytes(StoredFormat):
    """Reads `weight` by its `quant_state`, or by the scales of rows in `SCB`."""

    name = "bitsandbytes"
    suffixes = (
        *(".weight.absmax", ".weight.nested_absmax", ".weight.nested_quant_map", ".weight.quant_map", *_STATES),
        *(".SCB", ".weight_format"),
    )

    def __init__(self, section: Section) -> None:
        self._is_int8 = section.bool("load_in_8bit", False)
        self._skipped = names_in(section, "llm_int8_skip_modules") or ["lm_head"]

    def spec_of(self, name: str) -> CodeSpec | None:
        return _INT8 if self._is_int8 and not is_skipped(name, self._skipped) else None

    def open(self, name: str, parts: Parts) -> StoredWeight:
        return _int8(name, parts) if ".SCB" in parts else _four_bits(name, parts)


def _int8(name: str, parts: Parts) -> StoredWeight:
    weight, most = needed(parts, name, ".weight", "I8"), needed(parts, name, ".SCB", "F32")
    outputs, inputs = sizes_of(weight)
    expect_shape(most, (outputs,), weight.name)
    read = {"codes": lambda rows: rows_of(weight, rows), "scales": lambda rows: scales_of(most, rows)[:, None] / 127}
    return StoredWeight((outputs, inputs), "LLM.int8", read, _INT8)


def _four_bits(name: str, parts: Parts) -> StoredWeight:
    suffix = next((each for each in _STATES if each in parts), _STATES[0])
    state = _state(needed(parts, name, suffix, "U8"))
    packed, absmax = needed(parts, name, ".weight", "U8"), needed(parts, name, ".weight.absmax", "F32", "U8")
    table = needed(parts, name, ".weight.quant_map", "F32")
    (outputs, inputs), block = state["shape"], state["blocksize"]
    num_blocks = -(-outputs * inputs // block)
    expect_shape(packed, ((outputs * inputs + 1) // 2, 1), f"shape {[outputs, inputs]} of its quant_state")
    expect_shape(absmax, (num_blocks,), f"blocks of {block}")
    expect_shape(table, (16,), "codes of 4 bits")

    def largest(first: int, last: int) -> Tensor:
        """Return the scales of blocks [first, last)."""
        own = rows_of(absmax, slice(first, last))
        if absmax.dtype == "F32":
            return finite(absmax, own, first)
        factors = needed(parts, name, ".weight.nested_absmax", "F32")
        codes = needed(parts, name, ".weight.nested_quant_map", "F32")
        outer = torch.arange(first, last) // state["nested_blocksize"]
        expect_shape(codes, (256,), "codes of 8 bits")
        expect_shape(factors, (-(-num_blocks // state["nested_blocksize"]),), f"{num_blocks} blocks")
        scales = finite(codes, rows_of(codes))[own.long()] * finite(factors, rows_of(factors))[outer]
        return scales + float(state["nested_offset"])

    def read(rows: slice) -> Tensor:
        of_rows = range(outputs)[rows]
        start, stop = of_rows.start * inputs, of_rows.stop * inputs
        found = packed.values(((slice(start // 2, (stop + 1) // 2),),))[start // 2 : (stop + 1) // 2, 0]
        # the first code of a byte has the higher bits
        codes = torch.stack((found >> 4, found & 15), -1).flatten()[start % 2 :][: stop - start]
        first = start // block
        scales = largest(first, -(-stop // block))
        values = finite(table, rows_of(table))[codes.long()] * scales[torch.arange(start, stop) // block - first]
        return values.view(len(of_rows), inputs)

    return StoredWeight((outputs, inputs), f"{suffix[-3:].upper()} in blocks of {block}", {"weight": read})


def _state(part: Part) -> dict[str, Any]:
    """Read the JSON that a tensor of bytes holds. Raises CheckpointError."""
    try:
        state: dict[str, Any] = json.loads(bytes(rows_of(part, ALL).tolist()))
        shape, sizes = state["shape"], [state["blocksize"], state.get("nested_blocksize", 256)]
        state["nested_blocksize"], state["nested_offset"] = sizes[1], float(state.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{part.name} is no JSON object with shape and blocksize, as quant_state is") from error
    if len(shape) != 2 or any(type(each) is not int or not 0 < each < 2**31 for each in (*shape, *sizes)):
        raise CheckpointError(f"{part.name} has shape {shape} and block sizes {sizes}, expected positive integers")
    return state
