"""Checkpoints of BitNet b1.58: codes -1, 0 and 1, four to a byte, with one scale for all of a weight.

A byte of row r has the codes of the rows r, r + n, r + 2 n and r + 3 n, lowest bits first, of 4 n rows in all.
Source: the integration `bitnet` of transformers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.config.section import Section
from octavo.errors import CheckpointError
from octavo.ops.coded import CodeSpec
from octavo.quantization.stored import (
    ALL,
    SCALES,
    Parts,
    StoredFormat,
    StoredWeight,
    expect_shape,
    finite,
    is_skipped,
    names_in,
    needed,
    rows_of,
    sizes_of,
)

_SPEC = CodeSpec(4, 0, "none", torch.float32)


class BitNet(StoredFormat):
    """Reads `weight` and `weight_scale`."""

    name = "bitnet"
    suffixes = (".weight_scale",)

    def __init__(self, section: Section) -> None:
        """Raise UnsupportedModel for plain weights that are quantised in each product (mode `online`)."""
        section.expect("quantization_mode", "offline")
        section.expect("use_rms_norm", False)
        self._divides = section.expect("linear_class", "bitlinear", "autobitlinear") == "bitlinear"
        self._skipped = names_in(section, "modules_to_not_convert") or ["lm_head"]

    def spec_of(self, name: str) -> CodeSpec | None:
        return None if is_skipped(name, self._skipped) else _SPEC

    def open(self, name: str, parts: Parts) -> StoredWeight:
        packed, scale = needed(parts, name, ".weight", "U8"), needed(parts, name, ".weight_scale", *SCALES)
        count, inputs = sizes_of(packed)
        expect_shape(scale, (1,), "one scale of a weight")

        def codes(rows: slice) -> Tensor:
            places = torch.arange(4 * count)[rows]
            found = rows_of(packed)[places % count] >> (2 * (places // count))[:, None].to(torch.uint8) & 3
            if (found == 3).any():
                row = int(places[(found == 3).any(1)][0])
                raise CheckpointError(f"{packed.name} has a code of 3 in row {row}, expected 0, 1 and 2")
            return found.to(torch.int8) - 1

        def scales(rows: slice) -> Tensor:
            value = finite(scale, rows_of(scale, ALL)).float()
            if not value > 0:
                raise CheckpointError(f"{scale.name} is {value.item()}, expected a number above 0")
            return (1 / value if self._divides else value).expand(4 * count, 1)[rows].contiguous()

        return StoredWeight((4 * count, inputs), "ternary codes", {"codes": codes, "scales": scales}, _SPEC)
