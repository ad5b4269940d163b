"""Checkpoints of GPTQ, AWQ and AutoRound: codes of 4 or 8 bits in words of 32, and their zero points beside them.

Formats: https://github.com/ModelCloud/GPTQModel, https://github.com/casper-hansen/AutoAWQ,
https://github.com/intel/auto-round.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import torch
from torch import Tensor

from octavo.config.section import Section
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.ops.coded import CodeSpec
from octavo.quantization.stored import (
    SCALES,
    Parts,
    Read,
    StoredFormat,
    StoredWeight,
    columns_of,
    digest,
    expect_shape,
    finite,
    group_of,
    is_skipped,
    matches,
    names_in,
    needed,
    order_of,
    rows_of,
    sizes_of,
    unpacked,
)

_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the number of each of eight columns is in a word of AWQ."""


class Gptq(StoredFormat):
    """Words along the inputs, `qweight` [inputs / 8, outputs] for 4 bits; `g_idx` has the group of each input.

    Version 1 stores zero points less one.
    """

    name = "gptq"
    suffixes = (".qweight", ".qzeros", ".scales", ".g_idx")

    def __init__(self, section: Section) -> None:
        """Raise CheckpointError or UnsupportedModel for a config that is not understood."""
        self._section = section
        self._version = section.expect("checkpoint_format", "gptq", "gptq_v2", default="gptq")
        self._rules = section.section("dynamic")
        self._head = section.bool("lm_head", False)

    def spec_of(self, name: str) -> CodeSpec | None:
        own = self._of(name)
        if own is None or (name.endswith("lm_head") and not self._head):
            return None
        return _spec(name, own, torch.float16, -1, has_order=own.bool("desc_act", False))

    def open(self, name: str, parts: Parts) -> StoredWeight:
        own = self._of(name)
        if own is None:
            raise CheckpointError(f"{next(iter(parts.values())).name} is stored, but quantization_config skips {name}")
        return _by_inputs(name, own, parts, offset=int(self._version == "gptq"))

    def _of(self, name: str) -> Section | None:
        """Return what the config says of a weight; None where it is not quantised."""
        for rule in self._rules.values if self._rules is not None else ():
            if matches(rule.partition(":")[2] if rule[:2] in ("+:", "-:") else rule, name):
                own = self._rules.section(rule) if self._rules is not None else None
                if rule.startswith("-:"):
                    return None
                return Section(
                    {**self._section.values, **(own.values if own else {})}, self._section.where, "quantization_config."
                )
        return self._section


class Awq(StoredFormat):
    """Words along the outputs, `qweight` [inputs, outputs / 8], in an order of their own."""

    name = "awq"
    suffixes = (".qweight", ".qzeros", ".scales")

    def __init__(self, section: Section) -> None:
        """Raise CheckpointError or UnsupportedModel for a config that is not understood."""
        version = section.str("version", "gemm").lower()
        if version != "gemm":
            raise UnsupportedModel(
                f'{section.where}: quantization_config.version is "{version}", expected "gemm"; use a checkpoint in '
                "that order"
            )
        names = {"bits": "w_bit", "group_size": "q_group_size"}
        older = {ours: section.values[theirs] for ours, theirs in names.items() if theirs in section.values}
        self._section = Section({**older, **section.values}, section.where, "quantization_config.")
        self._skipped = names_in(section, "modules_to_not_convert")

    def spec_of(self, name: str) -> CodeSpec | None:
        if name.endswith("lm_head") or is_skipped(name, self._skipped):
            return None
        return _spec(name, self._asymmetric(), torch.float16, -1)

    def open(self, name: str, parts: Parts) -> StoredWeight:
        return _by_outputs(name, self._asymmetric(), parts)

    def _asymmetric(self) -> Section:
        own = Section({**self._section.values, "sym": False}, self._section.where, "quantization_config.")
        own.expect("bits", 4)
        return own


class AutoRound(StoredFormat):
    """The order of bytes of GPTQ or AWQ; `extra_config` has what differs for single weights."""

    name = "auto-round"
    suffixes = Gptq.suffixes

    def __init__(self, section: Section) -> None:
        """Raise CheckpointError or UnsupportedModel for a config that is not understood."""
        packing = section.str("packing_format", "auto_round:auto_gptq")
        self._is_awq = "awq" in packing
        if not packing.startswith("auto_round"):
            raise section.error("packing_format", "auto_round:auto_gptq or auto_round:auto_awq")
        self._offset = int("gptq" in packing)
        section.expect("data_type", "int", default="int")
        self._section, self._extra = section, section.section("extra_config")

    def spec_of(self, name: str) -> CodeSpec | None:
        own = self._of(name)
        if own is None or name.endswith("lm_head"):
            return None
        return _spec(name, own, torch.float16, -1)

    def open(self, name: str, parts: Parts) -> StoredWeight:
        own = self._of(name)
        if own is None:
            raise CheckpointError(f"{next(iter(parts.values())).name} is stored, but extra_config skips {name}")
        return _by_outputs(name, own, parts) if self._is_awq else _by_inputs(name, own, parts, offset=self._offset)

    def _of(self, name: str) -> Section | None:
        extra: dict[str, Any] = {}
        for pattern in self._extra.values if self._extra is not None else ():
            if pattern == name or (not pattern.isidentifier() and matches(f"(?:{pattern})$", name)):
                found = self._extra.section(pattern) if self._extra is not None else None
                extra = dict(found.values) if found is not None else {}
        if extra.get("bits", 0) in (16, 32):
            return None
        return Section({**self._section.values, **extra}, self._section.where, "quantization_config.")


def _spec(name: str, own: Section, scales: torch.dtype, inputs: int, *, has_order: bool = False) -> CodeSpec:
    """Raise UnsupportedModel for bits, and CheckpointError for groups, that no kernel has."""
    bits = _bits(own)
    group = group_of(name, own.int("group_size", -1), inputs)
    return CodeSpec(bits, group, "none" if own.bool("sym", True) else "zeros", scales, has_order=has_order)


def _bits(own: Section) -> Literal[4, 8]:
    """Raise CheckpointError or UnsupportedModel for bits that no kernel has."""
    own.int("bits")
    own.expect("bits", 4, 8)
    return 4 if own.int("bits") == 4 else 8


def _by_inputs(name: str, own: Section, parts: Parts, *, offset: int) -> StoredWeight:
    """Open words along the inputs, whose zero points are stored less `offset`."""
    words, scale = needed(parts, name, ".qweight", "I32"), needed(parts, name, ".scales", *SCALES)
    bits = _bits(own)
    rows, outputs = sizes_of(words)
    inputs = rows * 32 // bits
    spec = _spec(name, own, SCALES[scale.dtype], inputs)
    order = (
        order_of(parts[".g_idx"], spec, inputs, is_stated=own.bool("desc_act", False)) if ".g_idx" in parts else None
    )
    if order is not None:
        spec = _spec(name, own, SCALES[scale.dtype], inputs, has_order=True)

    def codes(rows: slice) -> Tensor:
        found = unpacked(columns_of(words, rows).t(), bits)
        return found if order is None else found[:, order]

    read = _read(name, spec, parts, (outputs, inputs), codes, offset)
    if order is None:
        return StoredWeight((outputs, inputs), _label(own), read, spec)
    whole = order.int()
    return StoredWeight((outputs, inputs), _label(own), {**read, "order": lambda _: whole}, spec, digest(order))


def _by_outputs(name: str, own: Section, parts: Parts) -> StoredWeight:
    """Open words along the outputs."""
    words, scale = needed(parts, name, ".qweight", "I32"), needed(parts, name, ".scales", *SCALES)
    inputs, columns = sizes_of(words)
    outputs = columns * 8
    spec = _spec(name, own, SCALES[scale.dtype], inputs)

    def codes(rows: slice) -> Tensor:
        places = range(outputs)[rows]
        first = places.start // 8
        found = _awq(columns_of(words, slice(first, -(-places.stop // 8)))).t()
        return found[places.start - 8 * first :][: len(places)].contiguous()

    read = _read(name, spec, parts, (outputs, inputs), codes, 0, is_awq=True)
    return StoredWeight((outputs, inputs), _label(own), read, spec)


def _read(
    name: str, spec: CodeSpec, parts: Parts, shape: tuple[int, int], codes: Read, offset: int, *, is_awq: bool = False
) -> dict[str, Read]:
    """Return what reads unsigned codes, scales and zero points of a spec."""
    outputs, inputs = shape
    scale, groups, half = parts[".scales"], spec.num_groups(inputs), 2 ** (spec.bits - 1)
    expect_shape(scale, (groups, outputs), f"{spec.bits}-bit codes in groups of {spec.group or inputs}")
    zero = needed(parts, name, ".qzeros", "I32")
    expect_shape(zero, (groups, -(-outputs * spec.bits // 32)), f"{spec.bits} bits for each of {outputs} outputs")

    def scales(rows: slice) -> Tensor:
        return finite(scale, columns_of(scale, rows)).t().contiguous()

    def zeros(rows: slice) -> Tensor:
        found = _awq(rows_of(zero)) if is_awq else unpacked(rows_of(zero), spec.bits)
        # a sum of 16 that its four bits do not hold is zero, as the first kernels had it
        stored: Tensor = (found.short() + offset) & (2 * half - 1)
        return stored[:, :outputs].t()[rows].contiguous()

    if spec.zero == "zeros":
        return {"codes": codes, "scales": scales, "zeros": zeros}

    def signed(rows: slice) -> Tensor:
        if (other := zeros(rows) != half).any():
            row = int(other.nonzero()[0, 0]) + (rows.start or 0)
            raise CheckpointError(
                f"{zero.name} holds a zero point other than {half} for output {row}, although sym is true"
            )
        found: Tensor = codes(rows) - half
        return found.view(torch.int8)

    return {"codes": signed, "scales": scales}


def _awq(words: Tensor) -> Tensor:
    """Return the numbers of words [rows, words], column after column."""
    numbers = unpacked(words, 4)
    return numbers.view(len(numbers), -1, 8)[..., list(_AWQ_ORDER)].flatten(1)


def _label(own: Section) -> str:
    return f"{own.int('bits')}-bit codes in groups of {own.int('group_size', -1)}".replace("groups of -1", "channels")
