"""The protocol of weight formats, and those that are made at load from checkpoints that are not quantised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Protocol

from torch import Tensor

from octavo.ops.coded import CodeSpec
from octavo.ops.prepare_linear import LinearFormat, LinearShape, PreparedLinear, TensorSpec
from octavo.ops.registry import Ops


class WeightMethod(Protocol):
    """How a linear layer, or a head, keeps its weight. One object serves many layers and holds no state of any."""

    @property
    def name(self) -> str:
        """Its name for people and in the identity of packed weights."""

    def tensors(self, shape: LinearShape) -> dict[str, TensorSpec]:
        """Return what the layer is filled with beside a bias; dimension 0 of each but `order` counts outputs."""

    def source(self, tensors: Mapping[str, Tensor]) -> Any:
        """Return the weight that `format` packs, made of the filled `tensors`, which may be views of a mapped file."""

    def format(self, ops: Ops) -> LinearFormat:
        """Return the format that the tensors are brought into."""

    def pack(self, ops: Ops, shape: LinearShape, tensors: Mapping[str, Tensor], bias: Tensor | None) -> PreparedLinear:
        """Bring the filled `tensors` into the form that computes best, in memory of its own."""


Methods = Callable[[str], WeightMethod]
"""Chooses the method of a stored weight by its name, without the prefix of all names of a model."""


@dataclass(frozen=True, slots=True)
class FromPlain:
    """A method whose layers are filled with plain `weight` [outputs, inputs]: quantised as `spec` says, or kept."""

    name: str
    spec: CodeSpec | None = None
    requantizes: bool = False
    """Whether it also takes what a checkpoint has quantised already, dequantised."""

    def tensors(self, shape: LinearShape) -> dict[str, TensorSpec]:
        return {"weight": TensorSpec((shape.outputs, shape.inputs), shape.dtype)}

    def source(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors["weight"]

    def format(self, ops: Ops) -> LinearFormat:
        return ops.prepare_linear if self.spec is None else ops.prepare_quantized(self.spec)

    def pack(self, ops: Ops, shape: LinearShape, tensors: Mapping[str, Tensor], bias: Tensor | None) -> PreparedLinear:
        return self.format(ops)(tensors["weight"], bias, gated=shape.is_gated)


@dataclass(frozen=True, slots=True)
class Coded:
    """A method whose layers are filled with the codes of a quantised checkpoint, which stay as they are.

    Weights of one layer that have different `order`s of their inputs are kept apart.
    """

    spec: CodeSpec
    order: str = ""
    """Digest of the order of the inputs; empty where they are not reordered."""

    @property
    def name(self) -> str:
        return self.spec.layout

    def tensors(self, shape: LinearShape) -> dict[str, TensorSpec]:
        return self.spec.tensor_specs(shape.outputs, shape.inputs)

    def source(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return tensors

    def format(self, ops: Ops) -> LinearFormat:
        return ops.prepare_coded(self.spec)

    def pack(self, ops: Ops, shape: LinearShape, tensors: Mapping[str, Tensor], bias: Tensor | None) -> PreparedLinear:
        return ops.prepare_coded(self.spec)(tensors, shape.dtype, bias, gated=shape.is_gated)


UNQUANTIZED = FromPlain("unquantized")
"""Weights are multiplied in their own type."""


def without_codes(method: WeightMethod) -> WeightMethod:
    """Return the method of a layer that cannot keep codes: such a weight is dequantised."""
    return UNQUANTIZED if isinstance(method, Coded) else method


def columns_of(method: WeightMethod, name: str, shape: LinearShape, inputs: range) -> tuple[int, slice] | None:
    """Return how many columns a tensor of a stored weight has, and those of a range of its inputs; None where the range
    would cut a group or an order of inputs."""

    def before(place: int) -> int:
        return method.tensors(replace(shape, inputs=place))[name].shape[1]

    if name == "order":
        return None
    if before(shape.inputs) == 1:  # a scale of all inputs
        return 1, slice(0, 1)
    # one more input has one more column only where a group begins
    if any(before(cut) == before(cut + 1) for cut in (inputs.start, inputs.stop) if 0 < cut < shape.inputs):
        return None
    return before(shape.inputs), slice(before(inputs.start), before(inputs.stop))


def without_cut_floats(method: WeightMethod, shape: LinearShape, inputs: range) -> WeightMethod:
    """Return the method of a layer that has a range of a weight's inputs: FP8 whose groups the range would cut is
    decoded to the plain weight, as where nothing keeps it."""
    is_float = isinstance(method, Coded) and method.spec.is_plain
    return UNQUANTIZED if is_float and columns_of(method, "scales", shape, inputs) is None else method


class KeptAs(NamedTuple):
    """How the codes of a quantised checkpoint are multiplied: with activations of so many bits. has_float8: whether FP8
    stays codes too."""

    activation_bits: int = 8
    has_float8: bool = False


DEFAULT_CODES: Final = KeptAs()
STORED: Final = "stored"
"""The name of all methods of a quantised checkpoint together, in the identity of packed weights."""
