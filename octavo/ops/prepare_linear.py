"""Weights of linear layers in the form that multiplies best: how they get into it, compute in it and are kept.

The operator is a `LinearFormat`. It takes a plain weight and answers a `PreparedLinear` that has memory of its own: the
plain one is released at once. Formats of quantised weights are further operators of this kind, which take what was
quantised; all answer the same `PreparedLinear`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.activation import silu_and_mul
from octavo.ops.linear import linear
from octavo.ops.memory import zeroed
from octavo.ops.registry import Operator


@dataclass(frozen=True, slots=True)
class LinearShape:
    """What is known of a weight before it is read."""

    outputs: int
    """Rows of the plain weight; of a gated one, gate and up together."""
    inputs: int
    dtype: torch.dtype
    """Of the plain weight, of x and of the answer."""
    has_bias: bool = False
    is_gated: bool = False


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that is not there yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The spec that `tensor` meets."""
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def nbytes(self) -> int:
        """Its size in memory."""
        return prod(self.shape) * self.dtype.itemsize


class PreparedLinear(ABC):
    """A weight [outputs, inputs], with its bias, ready to be multiplied."""

    shape: LinearShape

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, inputs] → x @ weight.T + bias [tokens, outputs], in the type of x.

        A gated weight is gate stacked on up; its answer is silu(gate) * up, [tokens, outputs / 2]. A row has the same
        bits whatever its neighbours are.
        """

    def in_float32(self, x: Tensor) -> Tensor:
        """The same answer as float32, which logits are; an implementation may spare it the rounding in between."""
        return self(x).float()

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the plain weight: ids int64 [tokens] → [tokens, inputs], what embeddings read."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """All that the format keeps, as dense tensors without copy; what `LinearFormat.restore` takes."""

    @property
    def nbytes(self) -> int:
        """Memory that it holds."""
        return sum(tensor.nbytes for tensor in self.state().values())


class LinearFormat(Protocol):
    """How an implementation keeps weights: the type of `ops.prepare_linear`."""

    @property
    def layout(self) -> str:
        """Names the order of the bytes in `PreparedLinear.state`: formats of one name read each other's states."""
        ...

    def __call__(self, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> PreparedLinear:
        """Bring a weight [outputs, inputs] and a bias [outputs] into this form.

        The answer keeps neither tensor: they may be views of a mapped file, at any address that their type allows.
        With `gated` the weight is gate stacked on up, and the answer computes silu(gate) * up.
        """
        ...

    def state_specs(self, shape: LinearShape) -> dict[str, TensorSpec]:
        """The tensors that `PreparedLinear.state` will have for a weight of this shape, padding included."""
        ...

    def restore(self, shape: LinearShape, state: Mapping[str, Tensor]) -> PreparedLinear:
        """What `state` was taken from, without the plain weight.

        The tensors meet `state_specs(shape)` and start at multiples of 64 bytes; they may lie in a file that is mapped
        for reading.
        """
        ...


class PlainLinear(PreparedLinear):
    """The weight as the checkpoint has it, multiplied by torch."""

    def __init__(self, shape: LinearShape, weight: Tensor, bias: Tensor | None) -> None:
        self.shape = shape
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """See `PreparedLinear`."""
        product = linear(x, self._weight, self._bias)
        return silu_and_mul(product) if self.shape.is_gated else product

    def rows(self, ids: Tensor) -> Tensor:
        """See `PreparedLinear.rows`."""
        return F.embedding(ids, self._weight)

    def state(self) -> dict[str, Tensor]:
        """`weight` [outputs, inputs], and `bias` [outputs] where there is one."""
        return {"weight": self._weight} if self._bias is None else {"weight": self._weight, "bias": self._bias}


class PlainFormat:
    """Keeps weights as they are. The reference: plain torch, which says what is right."""

    layout = "plain/1"

    def __call__(self, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> PreparedLinear:
        """See `LinearFormat`."""
        outputs, inputs = weight.shape
        shape = LinearShape(outputs, inputs, weight.dtype, bias is not None, gated)
        own = zeroed((outputs, inputs), weight.dtype, weight.device).copy_(weight)
        return PlainLinear(shape, own, None if bias is None else bias.clone())

    def state_specs(self, shape: LinearShape) -> dict[str, TensorSpec]:
        """See `LinearFormat.state_specs`."""
        specs = {"weight": TensorSpec((shape.outputs, shape.inputs), shape.dtype)}
        return {**specs, "bias": TensorSpec((shape.outputs,), shape.dtype)} if shape.has_bias else specs

    def restore(self, shape: LinearShape, state: Mapping[str, Tensor]) -> PreparedLinear:
        """See `LinearFormat.restore`."""
        return PlainLinear(shape, state["weight"], state.get("bias"))


def examples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """(x, ids, weight, bias, gated): one token, a few, more than a tile; widths that are no multiple of anything."""
    generator = torch.Generator().manual_seed(0)
    for tokens, inputs, outputs in ((1, 64, 96), (3, 40, 18), (33, 128, 160)):
        x, weight = (torch.randn(shape, generator=generator) for shape in ((tokens, inputs), (outputs, inputs)))
        ids = torch.tensor([0, outputs - 1, outputs // 2, 0])
        x, weight = x.to(dtype), (weight / inputs**0.5).to(dtype)
        yield x, ids, weight, None, False
        bias = torch.randn(outputs, generator=generator).to(dtype)
        yield x, ids, weight, bias, False
        yield x, ids, weight, None, True
        yield x, ids, weight, bias, True


def trial(
    prepare: Callable[..., PreparedLinear], x: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None, gated: bool
) -> tuple[Tensor, Tensor]:
    """(the product, rows of the weight) of one list of `examples`."""
    prepared = prepare(weight, bias, gated=gated)
    return prepared(x), prepared.rows(ids)


OPERATORS = (Operator("prepare_linear", PlainFormat(), examples, trial=trial),)
