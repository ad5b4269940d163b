"""Weights as quantised checkpoints store them: the protocol of their formats, and what these are written with.

A format is a file beside this one. From the tensors that belong to one weight it makes a `StoredWeight`, which says by
headers alone how the weight is kept, and decodes what a layer asks for when it is read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import torch
from torch import Tensor

from octavo.config.section import Section
from octavo.errors import CheckpointError
from octavo.ops.coded import CodeSpec
from octavo.ops.prepare_linear import TensorSpec

Read = Callable[[slice], Tensor]
"""Returns a range of rows of a tensor: indices of its dimension 0."""
ALL = slice(None)
CODED: Final = ("codes", "scales", "zeros", "minimums", "super_scales", "super_minimums", "order")
"""The tensors that fill a layer which keeps codes."""
TENSORS: Final = ("weight", *CODED)
"""The tensors that fill a layer; their names follow the name of the weight."""


class Part(Protocol):
    """A stored tensor of a weight."""

    @property
    def name(self) -> str:
        """Its name in the checkpoint."""

    @property
    def dtype(self) -> str:
        """Its type in the words of safetensors (F16, I32)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in the checkpoint."""

    @property
    def values(self) -> Callable[[tuple[tuple[slice, ...], ...]], Tensor]:
        """Returns a view of the file with some parts in memory."""


Parts = Mapping[str, Part]
"""The tensors of one weight by what stands behind its name: `.qweight`, `_blocks`."""


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A quantised weight: codes that are kept as they are, or a plain weight that is computed when it is read."""

    shape: tuple[int, ...]
    """Shape of the plain weight: [outputs, inputs], or [experts, outputs, inputs]."""
    label: str
    """How it is stored, for people."""
    read: Mapping[str, Read]
    """Functions that read the tensors of `spec`, by name; that of `weight` where there is no spec."""
    spec: CodeSpec | None = None
    order: str = ""
    """Digest of the order of the inputs."""

    def tensors(self) -> dict[str, TensorSpec]:
        """Return the tensors that `rows` can read, by name."""
        plain = TensorSpec(self.shape, torch.float32)
        if self.spec is None:
            return {"weight": plain}
        *experts, outputs, inputs = self.shape
        own = self.spec.tensor_specs(outputs, inputs)
        return {"weight": plain, **{name: replace(each, shape=(*experts, *each.shape)) for name, each in own.items()}}

    def plain(self) -> StoredWeight:
        """Return the weight without its codes: its rows are dequantised when they are read."""
        return replace(self, read={"weight": lambda rows: self.rows("weight", rows)}, spec=None)

    def rows(self, name: str, rows: slice = ALL) -> Tensor:
        """Return rows of one of `tensors`; only what they are made of is decoded. Raises CheckpointError."""
        if name in self.read:
            return self.read[name](ALL if name == "order" else rows)
        assert self.spec is not None, f"{self.label} has no {name}"
        coded = {name: self.rows(name, rows) for name in self.read}
        if len(self.shape) == 2:
            return self.spec.dequantized(coded)
        experts = range(len(coded["codes"]))
        return torch.stack([self.spec.dequantized({n: each[e] for n, each in coded.items()}) for e in experts])


class StoredFormat(Protocol):
    """A format of quantised checkpoints, made from their `quantization_config`."""

    name: str
    suffixes: Sequence[str]
    """What stands behind the name of a weight in the names of its tensors; those of biases are no part of it."""

    def spec_of(self, name: str) -> CodeSpec | None:
        """Return how the config keeps the weight `name`, as far as that is known without headers; None for plain."""

    def open(self, name: str, parts: Parts) -> StoredWeight:
        """Return the weight that `parts` store. Raises CheckpointError for what contradicts itself or the config."""


def rows_of(part: Part, rows: slice = ALL) -> Tensor:
    """Read rows of a stored tensor."""
    return part.values(((rows,),))[rows]


def columns_of(part: Part, columns: slice) -> Tensor:
    """Read columns of a stored tensor of two dimensions."""
    return part.values(((ALL, columns),))[:, columns]


def needed(parts: Parts, name: str, suffix: str, *dtypes: str) -> Part:
    """Return the part `suffix` of the weight `name`. Raises CheckpointError where it is missing or of another type."""
    part = parts.get(suffix)
    if part is None:
        raise CheckpointError(f"{name}{suffix} is missing, beside {next(iter(parts.values())).name}")
    if dtypes and part.dtype not in dtypes:
        raise CheckpointError(f"{part.name} is stored as {part.dtype}, expected {' or '.join(dtypes)}")
    return part


def sizes_of(part: Part) -> tuple[int, int]:
    """Return the shape of a stored tensor of two dimensions. Raises CheckpointError for another."""
    if len(part.shape) != 2 or 0 in part.shape:
        raise CheckpointError(f"{part.name} has shape {list(part.shape)}, expected two dimensions")
    return part.shape[0], part.shape[1]


def matches(pattern: str, name: str) -> bool:
    """Return whether a regular expression of a config matches the start of a name. Raises CheckpointError."""
    try:
        return re.match(pattern, name) is not None
    except re.error as error:
        raise CheckpointError(
            f"quantization_config has the pattern {pattern!r}, which is not understood: {error}"
        ) from error


def expect_shape(part: Part, shape: Sequence[int], because: str) -> None:
    """Raise CheckpointError where a stored tensor has another shape."""
    if part.shape != tuple(shape):
        raise CheckpointError(f"{part.name} has shape {list(part.shape)}, {because} requires {list(shape)}")


def finite(part: Part, values: Tensor, start: int = 0) -> Tensor:
    """Return `values` of a part, whose first row is `start`. Raises CheckpointError for NaN and infinities."""
    if not values.isfinite().all():
        row = start + int((~values.isfinite()).nonzero()[0, 0])
        raise CheckpointError(
            f"{part.name} holds {values[~values.isfinite()][0]} in row {row}, expected finite numbers"
        )
    return values


def scales_of(part: Part, rows: slice) -> Tensor:
    """Read rows of scales. Raises CheckpointError for NaN and infinities."""
    return finite(part, rows_of(part, rows), rows.start or 0)


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the unsigned numbers of 4 or 8 bits that int32 words [rows, words] hold, lowest first: uint8."""
    numbers = words.contiguous().view(torch.uint8)
    return numbers if bits == 8 else torch.stack((numbers & 15, numbers >> 4), -1).flatten(-2)


def names_in(section: Section, name: str) -> list[str]:
    """Return a list of names in a config; empty where there is none. Raises CheckpointError."""
    found = section.values.get(name) or []
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise section.error(name, "a list of names")
    return found


def is_skipped(name: str, skipped: Sequence[str]) -> bool:
    """Return whether the weight is one of those that are not quantised: parts of names, with * for anything."""
    return any(re.search(re.escape(each).replace(r"\*", ".*"), name) for each in skipped)


def group_of(name: str, group: int, inputs: int) -> int:
    """Return the group of a spec: 0 where one scale is that of all inputs. Raises CheckpointError."""
    if group in (-1, 0) or group >= inputs > 0:
        return 0
    if group not in (16, 32) and (group < 0 or group % 64):
        raise CheckpointError(
            f"{name} is quantised in groups of {group} inputs, expected 16, 32, a multiple of 64 or -1"
        )
    return group


def order_of(part: Part, spec: CodeSpec, inputs: int, *, is_stated: bool) -> Tensor | None:
    """Return which input each column of the codes is multiplied with, so that groups are neighbours; None for as they
    are. Raises CheckpointError for groups of other sizes."""
    expect_shape(part, (inputs,), f"a weight of {inputs} inputs")
    if part.dtype not in ("I32", "I64"):
        raise CheckpointError(f"{part.name} is stored as {part.dtype}, expected I32")
    groups = rows_of(part, ALL).long()
    if not spec.group or (not groups.any() and not is_stated):
        return None
    wanted = torch.arange(inputs) // spec.group
    if torch.equal(groups, wanted):
        return None
    if groups.min() < 0 or groups.max() >= spec.num_groups(inputs):
        place = int(((groups < 0) | (groups >= spec.num_groups(inputs))).nonzero()[0])
        raise CheckpointError(
            f"{part.name} has group {int(groups[place])} for input {place}, expected 0 to {spec.num_groups(inputs) - 1}"
        )
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order], wanted):
        raise CheckpointError(f"{part.name} has groups of other sizes than group_size, which is {spec.group}")
    return order


def digest(order: Tensor) -> str:
    """Return a digest of the order: 16 hexadecimal digits of its SHA-256."""
    return hashlib.sha256(order.to(torch.int32).numpy().tobytes()).hexdigest()[:16]


OF_ACTIVATIONS: Final = (
    *(".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale"),
    *(".prob_output_scale", ".activation_scale", ".act_scales", ".qscale_act"),
)
"""Tensors that scale activations or caches for all tokens alike, which octavo does for each token."""
SCALES: Final = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
"""Types of scales by their names in safetensors."""
