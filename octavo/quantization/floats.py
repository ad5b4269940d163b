"""Weights stored as floats of 8 or 4 bits with scales: FP8 in blocks, channels or tensors, MXFP4 and NVFP4.

Codes of 4 bits stay codes. FP8 does where a device multiplies it, else it is dequantised when it is read. Sources:
DeepSeek-V3's release, Microscaling (MX) of the Open Compute Project, and compressed-tensors.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from octavo.config.section import Section
from octavo.errors import CheckpointError
from octavo.ops.coded import CodeSpec
from octavo.quantization.stored import (
    Part,
    Parts,
    Read,
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

_NAN: Final = 255
"""The exponent of 8 bits that stands for NaN."""
_BYTES: Final = ("I8", "U8")
"""How bytes with two codes each may be stored."""
_LEAST_GROUP: Final = 128
"""Inputs that share a scale of FP8 are a multiple of it, where codes stay codes."""
MXFP4: Final = CodeSpec(4, 32, "none", torch.bfloat16, is_float=True)
NVFP4: Final = CodeSpec(4, 16, "none", torch.float32, is_float=True)


class Fp8(StoredFormat):
    """`weight` in F8_E4M3 with `weight_scale_inv` of blocks, or `weight_scale` of channels or the tensor.

    In Mistral's own layout they are `qscale_weight`. DeepSeek-V4 calls them `scale`, and has experts whose weights are
    codes of MXFP4, two in a byte.
    """

    name = "fp8"
    suffixes = (".weight_scale_inv", ".weight_scale", ".qscale_weight", ".scale")

    def __init__(self, section: Section) -> None:
        """Raise CheckpointError or UnsupportedModel for a config that is not understood."""
        section.expect("fmt", "e4m3", "float8_e4m3fn", default="e4m3")
        self._block = block_of(section, "weight_block_size") if section.values.get("weight_block_size") else None

    def spec_of(self, name: str) -> CodeSpec | None:
        return None

    def open(self, name: str, parts: Parts) -> StoredWeight:
        suffix = next(
            (each for each in (".weight_scale", ".qscale_weight", ".scale") if each in parts), ".weight_scale_inv"
        )
        if suffix == ".scale" and ".weight" in parts and parts[".weight"].dtype in _BYTES:
            return _mxfp4(name, parts, (".weight", *_BYTES), (".scale", "F8_E8M0", "U8"))
        return fp8_weight(name, parts, suffix, self._block)


class Mxfp4(StoredFormat):
    """Stacked experts of gpt-oss: `_blocks` [experts, outputs, groups, 16] and `_scales` [experts, outputs, groups]."""

    name = "mxfp4"
    suffixes = ("_blocks", "_scales")

    def __init__(self, section: Section) -> None:
        self._skipped = names_in(section, "modules_to_not_convert")

    def spec_of(self, name: str) -> CodeSpec | None:
        return MXFP4 if ".experts." in name and not is_skipped(name, self._skipped) else None

    def open(self, name: str, parts: Parts) -> StoredWeight:
        blocks, scale = needed(parts, name, "_blocks", "U8"), needed(parts, name, "_scales", "U8")
        if len(blocks.shape) != 4 or blocks.shape[3] != MXFP4.group // 2:
            raise CheckpointError(
                f"{blocks.name} has shape {list(blocks.shape)}, expected [experts, outputs, groups, 16]"
            )
        *outer, groups, _ = blocks.shape
        expect_shape(scale, (*outer, groups), blocks.name)
        read = {
            "codes": lambda rows: nibbles(rows_of(blocks, rows).flatten(2)),
            "scales": lambda rows: powers_of_two(scale, rows),
        }
        return StoredWeight((*outer, MXFP4.group * groups), "MXFP4", read, MXFP4)


def block_of(section: Section, name: str) -> tuple[int, int]:
    """Return the rows and columns that share a scale. Raises CheckpointError."""
    found: Any = section.values.get(name)
    if not isinstance(found, list) or len(found) != 2 or not all(type(each) is int and each > 0 for each in found):
        raise section.error(name, "two integers, the rows and columns that share a scale")
    return found[0], found[1]


def fp8_weight(name: str, parts: Parts, suffix: str, block: tuple[int, int] | None) -> StoredWeight:
    """Open a weight in F8_E4M3 whose scales, behind `suffix`, are those of blocks, of outputs or of the whole."""
    weight = needed(parts, name, ".weight", "F8_E4M3")
    scale = needed(parts, name, suffix, "F32", "BF16", "F16", "F8_E8M0")
    outputs, inputs = sizes_of(weight)
    per_row, per_column = block or (1 if scale.shape in ((outputs,), (outputs, 1)) else outputs, inputs)
    rows_of_scales, columns = -(-outputs // per_row), -(-inputs // per_column)
    if scale.shape not in ((rows_of_scales, columns), (rows_of_scales,), ()) or (len(scale.shape) < 2 and columns > 1):
        expect_shape(
            scale, (rows_of_scales, columns), f"scales of {per_row} x {per_column} values of {list(weight.shape)}"
        )

    def scales(rows: slice) -> Tensor:
        found = scale.values(((),)).float().reshape(rows_of_scales, columns)
        return finite(scale, found)[torch.arange(outputs)[rows] // per_row]

    def plain(rows: slice) -> Tensor:
        return rows_of(weight, rows).float() * scales(rows).repeat_interleave(per_column, dim=1)[:, :inputs]

    label = f"FP8 with a scale for {per_row} x {per_column} values"
    if columns > 1 and per_column % _LEAST_GROUP:
        return StoredWeight((outputs, inputs), label, {"weight": plain})
    spec = CodeSpec(8, per_column if columns > 1 else 0, "none", torch.float32, is_float=True)
    read = {"weight": plain, "codes": lambda rows: rows_of(weight, rows).view(torch.uint8), "scales": scales}
    return StoredWeight((outputs, inputs), label, read, spec)


def fp4_weight(name: str, parts: Parts, spec: CodeSpec) -> StoredWeight:
    """Open codes of 4 bits, two in a byte, with the scales of MXFP4 or NVFP4."""
    if spec is MXFP4:
        return _mxfp4(name, parts, (".weight_packed", "U8"), (".weight_scale", "U8"))
    packed, scale = needed(parts, name, ".weight_packed", "U8"), needed(parts, name, ".weight_scale", "F8_E4M3")
    factor = needed(parts, name, ".weight_global_scale", "F32")
    whole = finite(factor, factor.values(((),)).reshape(-1))
    if len(whole) != 1 or whole[0] <= 0:
        raise CheckpointError(f"{factor.name} is {whole.tolist()[:4]}, expected one number above 0")

    def scales(rows: slice) -> Tensor:
        return finite(scale, rows_of(scale, rows).float(), rows.start or 0) / whole

    return _fp4(packed, scale, "NVFP4", spec, scales)


def _mxfp4(name: str, parts: Parts, packed: tuple[str, ...], scale: tuple[str, ...]) -> StoredWeight:
    """Open codes of MXFP4. packed, scale: what stands behind the name of the weight, and types."""
    codes, exponents = needed(parts, name, *packed), needed(parts, name, *scale)
    return _fp4(codes, exponents, "MXFP4", MXFP4, lambda rows: powers_of_two(exponents, rows))


def _fp4(packed: Part, scale: Part, label: str, spec: CodeSpec, scales: Read) -> StoredWeight:
    outputs, columns = sizes_of(packed)
    expect_shape(scale, (outputs, spec.num_groups(2 * columns)), f"groups of {spec.group} inputs")
    read = {"codes": lambda rows: nibbles(rows_of(packed, rows).view(torch.uint8)), "scales": scales}
    return StoredWeight((outputs, 2 * columns), label, read, spec)


def nibbles(packed: Tensor) -> Tensor:
    """Return the codes of bytes [..., n], the lower four bits first: uint8 [..., 2 n]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def powers_of_two(part: Part, rows: slice) -> Tensor:
    """Return scales that are stored as exponents of 8 bits: bfloat16. Raises CheckpointError for NaN."""
    exponents = rows_of(part, rows).view(torch.uint8)
    if (spoilt := exponents == _NAN).any():
        row = (rows.start or 0) + int(spoilt.nonzero()[0, 0])
        raise CheckpointError(f"{part.name} holds NaN, exponent {_NAN}, in row {row}, expected finite scales")
    # bits of bfloat16: an exponent of 8 bits before a fraction of 7, and 2^-127 as half of the smallest exponent
    return torch.where(exponents == 0, 64, exponents.short() << 7).short().view(torch.bfloat16)
