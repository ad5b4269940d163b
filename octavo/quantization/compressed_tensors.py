"""Checkpoints of the library compressed-tensors, which llm-compressor writes.

`config_groups` say how the weights that match their targets are stored. Formats and names of tensors are those of
https://github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from octavo.config.section import Section
from octavo.errors import CheckpointError
from octavo.ops.coded import CodeSpec
from octavo.quantization.floats import MXFP4, NVFP4, block_of, fp4_weight, fp8_weight
from octavo.quantization.stored import (
    ALL,
    SCALES,
    Part,
    Parts,
    StoredFormat,
    StoredWeight,
    digest,
    expect_shape,
    group_of,
    matches,
    needed,
    order_of,
    rows_of,
    scales_of,
    sizes_of,
    unpacked,
)

_LINEAR: Final = "Linear"
_FLOATS: Final = {32: MXFP4, 16: NVFP4}
"""By the inputs that share a scale."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """What a group of the config says of its weights."""

    bits: int
    kind: str
    """int or float."""
    strategy: str
    """tensor, channel, group, block or tensor_group."""
    group: int
    """Inputs that share a scale; 0 where all do."""
    is_symmetric: bool
    block: tuple[int, int]
    """Rows and columns that share a scale, for blocks."""
    targets: tuple[str, ...]

    @classmethod
    def read(cls, section: Section) -> Scheme | None:
        """Read a group; None for one that leaves weights as they are. Raises CheckpointError."""
        targets, weights = section.values.get("targets"), section.section("weights")
        if not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):
            raise section.error("targets", "a list of names")
        if weights is None:
            return None
        kind, bits = weights.expect("type", "int", "float"), weights.int("num_bits")
        group = weights.optional_int("group_size") or 0
        strategy = weights.str("strategy", "group" if group > 0 else "channel" if group < 0 else "tensor")
        block = block_of(weights, "block_structure") if strategy == "block" else (0, 0)
        if (kind, bits) == ("float", 4) and group not in _FLOATS:
            raise weights.error("group_size", "16 (NVFP4) or 32 (MXFP4)")
        if (kind, bits) not in (("int", 4), ("int", 8), ("float", 4), ("float", 8)):
            raise weights.error("num_bits", "4 or 8")
        return cls(bits, kind, strategy, group, weights.bool("symmetric", True), block, tuple(targets))


class CompressedTensors(StoredFormat):
    """Reads `weight_packed`, or `weight` beside `weight_scale`, by groups of modules."""

    name = "compressed-tensors"
    suffixes = (
        *(".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx"),
        ".weight_global_scale",
    )

    def __init__(self, section: Section) -> None:
        """Raise CheckpointError for a config that is not understood."""
        groups, ignored = section.section("config_groups"), section.values.get("ignore") or []
        if groups is None or not isinstance(ignored, list):
            raise section.error("config_groups", "an object of groups, beside a list of names to ignore")
        sections = [groups.section(each) for each in groups.values]
        self._schemes = [scheme for each in sections if each is not None and (scheme := Scheme.read(each)) is not None]
        self._ignored = [each for each in ignored if isinstance(each, str)]

    def spec_of(self, name: str) -> CodeSpec | None:
        scheme = self._scheme(name)
        if scheme is None or (scheme.kind, scheme.bits) == ("float", 8):
            return None
        if scheme.kind == "float":
            return _FLOATS[scheme.group]
        return _spec(name, scheme, torch.bfloat16, inputs=-1)

    def open(self, name: str, parts: Parts) -> StoredWeight:
        scheme = self._scheme(name)
        if scheme is None:
            raise CheckpointError(
                f"{next(iter(parts.values())).name} is stored, but quantization_config has no group for {name} or "
                "ignores it"
            )
        if scheme.kind == "int":
            return _integers(name, scheme, parts)
        if scheme.bits == 8:
            return fp8_weight(name, parts, ".weight_scale", scheme.block if scheme.strategy == "block" else None)
        return fp4_weight(name, parts, _FLOATS[scheme.group])

    def _scheme(self, name: str) -> Scheme | None:
        if any(_matches(name, each) for each in self._ignored):
            return None
        exact = [each for each in self._schemes if any(_matches(name, target) for target in each.targets)]
        general = [each for each in self._schemes if _LINEAR in each.targets]
        return next(iter([*exact, *general]), None)


def _matches(name: str, target: str) -> bool:
    return matches(target.removeprefix("re:"), name) if target.startswith("re:") else name == target


def _spec(name: str, scheme: Scheme, scales: torch.dtype, inputs: int) -> CodeSpec:
    group = group_of(name, scheme.group if scheme.strategy == "group" else 0, inputs)
    return CodeSpec(4 if scheme.bits == 4 else 8, group, "none" if scheme.is_symmetric else "zeros", scales)


def _integers(name: str, scheme: Scheme, parts: Parts) -> StoredWeight:
    """Open codes in words of 32 bits or, of 8 bits, in bytes."""
    scale = needed(parts, name, ".weight_scale", *SCALES)
    if ".weight_packed" in parts:
        packed = needed(parts, name, ".weight_packed", "I32")
        per_word = 32 // scheme.bits
        rows, words = sizes_of(packed)
        outputs, inputs = _stored_shape(parts, (rows, words * per_word))
        expect_shape(packed, (outputs, -(-inputs // per_word)), f"{scheme.bits} bits of {inputs} inputs")

        def unsigned(rows: slice) -> Tensor:
            return unpacked(rows_of(packed, rows), scheme.bits)[:, :inputs]
    else:
        packed = needed(parts, name, ".weight", "I8")
        outputs, inputs = sizes_of(packed)

        def unsigned(rows: slice) -> Tensor:
            return rows_of(packed, rows).view(torch.uint8) ^ 128

    spec = _spec(name, scheme, SCALES[scale.dtype], inputs)
    read = {"codes": unsigned, "scales": _by_row(scale, outputs, spec.num_groups(inputs))}
    if spec.zero == "none":
        # codes are stored with an offset of half their range
        half = 2 ** (scheme.bits - 1)
        read["codes"] = lambda rows: (unsigned(rows) - half).view(torch.int8)
    else:
        read["zeros"] = _zeros(needed(parts, name, ".weight_zero_point"), scheme, outputs, spec.num_groups(inputs))
    order = order_of(parts[".weight_g_idx"], spec, inputs, is_stated=True) if ".weight_g_idx" in parts else None
    label = f"{scheme.bits}-bit codes" + (" with zero points" if spec.zero == "zeros" else "")
    if order is None:
        return StoredWeight((outputs, inputs), label, read, spec)
    codes, whole = read["codes"], order.int()
    read |= {"codes": lambda rows: codes(rows)[:, order], "order": lambda _: whole}
    return StoredWeight((outputs, inputs), label, read, replace(spec, has_order=True), digest(order))


def _stored_shape(parts: Parts, found: tuple[int, int]) -> tuple[int, int]:
    """Return the sizes that the checkpoint states of a packed weight; by default those of its words."""
    part = parts.get(".weight_shape")
    if part is None:
        return found
    if part.dtype not in ("I32", "I64") or part.shape != (2,):
        raise CheckpointError(f"{part.name} is {part.dtype} {list(part.shape)}, expected two integers")
    outputs, inputs = rows_of(part).tolist()
    return int(outputs), int(inputs)


def _by_row(scale: Part, outputs: int, groups: int) -> Any:
    """Return what reads scales [outputs, groups], of which a checkpoint may have one for all."""
    if scale.shape in ((1,), (), (1, 1)):
        whole = scales_of(scale, ALL).reshape(1, 1) if scale.shape else scale.values(((),)).reshape(1, 1)
        return lambda rows: whole.expand(len(torch.arange(outputs)[rows]), groups)
    if scale.shape == (outputs,) and groups == 1:
        return lambda rows: scales_of(scale, rows)[:, None]
    expect_shape(scale, (outputs, groups), f"{groups} scales for each of {outputs} outputs")
    return lambda rows: scales_of(scale, rows)


def _zeros(part: Part, scheme: Scheme, outputs: int, groups: int) -> Any:
    """Return what reads zero points int16 [outputs, groups] of unsigned codes."""
    half = 2 ** (scheme.bits - 1)
    if part.dtype == "I32":
        expect_shape(
            part, (-(-outputs * scheme.bits // 32), groups), f"{scheme.bits} bits for each of {outputs} outputs"
        )

        def read(rows: slice) -> Tensor:
            return unpacked(rows_of(part).t(), scheme.bits)[:, :outputs].t()[rows].short().contiguous()

        return read
    if part.dtype != "I8":
        raise CheckpointError(f"{part.name} is stored as {part.dtype}, expected I32 or I8")
    whole = _by_row(part, outputs, groups)
    return lambda rows: whole(rows).to(torch.int16) + half
