"""Weights of linear layers in the form that multiplies best: how they get into it, compute in it and are kept.

The operator is a `LinearFormat`. It makes of a plain weight a `PreparedLinear` that has memory of its own: the plain
one is released at once. Formats of quantised weights are further operators of this kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.elementwise import silu_and_mul
from octavo.ops.experts import LinearStack, PreparedStack
from octavo.ops.memory import zeroed
from octavo.ops.registry import Operator


@dataclass(frozen=True, slots=True)
class LinearShape:
    """Sizes and types of a weight, which are known before it is read."""

    outputs: int
    """Rows of the plain weight; of a gated one, gate and up together."""
    inputs: int
    dtype: torch.dtype
    """Type of the plain weight, of x and of the product."""
    has_bias: bool = False
    is_gated: bool = False
    all_outputs: int = 0
    """Outputs of all ranks that share the weight; 0 where these are all."""

    @property
    def columns(self) -> int:
        """Columns of the product: half of the outputs where one half is the gate of the other."""
        return self.outputs // 2 if self.is_gated else self.outputs


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and type of a tensor that is not made yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Return the shape and type of `tensor`."""
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize


def heads_apart(outputs: int) -> int:
    """Return how many rows of a weight a head of `outputs` rows has with its padding, for `PreparedLinear.by_head`."""
    return -(-outputs // 32) * 32


class PreparedLinear(ABC):
    """A weight [outputs, inputs], with its bias, ready to be multiplied. `state` is all that the format keeps."""

    def __init__(self, shape: LinearShape, state: Mapping[str, Tensor]) -> None:
        self.shape = shape
        self._state = dict(state)

    @abstractmethod
    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """x [tokens, inputs] → x @ weight.T + bias + add [tokens, outputs], in the type of x.

        A gated weight is gate stacked on up; its result is silu(gate) * up, [tokens, outputs / 2]. `add`, float32
        [tokens, outputs], is added before that activation: a bias per row, as adapters compute it. A row has the same
        bits whatever its neighbours are.
        """

    def in_float32(self, x: Tensor) -> Tensor:
        """Return the product in float32, the type of logits; an implementation may omit the rounding in between."""
        return self(x).float()

    def write(self, x: Tensor, out: Tensor, add: Tensor | None = None) -> None:
        """Write the product to out [tokens, outputs], of the type of x or in float32; its rows may lie apart."""
        assert add is None or out.dtype is x.dtype, "an addend belongs to a product in the type of x"
        out.copy_(self(x, add) if out.dtype is x.dtype else self.in_float32(x))

    def by_head(self, x: Tensor, outputs: int) -> Tensor:
        """Multiply heads of x [tokens, heads, inputs], which lie side by side, each by rows of the weight of its own.

        Those are `outputs` rows per head, from `heads_apart` times its number on. Returns [tokens, heads, outputs].
        """
        raise NotImplementedError(f"{type(self).__name__} has no products by head")

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor:
        """Return rows of the plain weight, which embeddings read: ids int64 [tokens] → [tokens, inputs]."""

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that the format keeps, dense and without a copy; `LinearFormat.restore` takes them."""
        return dict(self._state)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the weight holds."""
        return sum(tensor.nbytes for tensor in self._state.values())


class LinearFormat(ABC):
    """How an implementation keeps weights: the type of `ops.prepare_linear`."""

    layout: str
    """Name of the order of the bytes in `PreparedLinear.state`: formats of one name read each other's states."""

    def __call__(self, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> PreparedLinear:
        """Bring a weight [outputs, inputs] and a bias [outputs] into this form.

        The result keeps neither tensor: they may be views of a mapped file, at any address that their type allows.
        With `gated` the weight is gate stacked on up, and the result computes silu(gate) * up.
        """
        outputs, inputs = weight.shape
        shape = LinearShape(outputs, inputs, weight.dtype, bias is not None, gated)
        state = {name: self.zeros(spec, weight.device) for name, spec in self.state_specs(shape).items()}
        self.pack_into(state, weight, bias, gated=gated)
        return self.restore(shape, state)

    @abstractmethod
    def state_specs(self, shape: LinearShape) -> dict[str, TensorSpec]:
        """Return what `PreparedLinear.state` will hold for a weight of this shape, padding included."""

    @abstractmethod
    def restore(self, shape: LinearShape, state: Mapping[str, Tensor]) -> PreparedLinear:
        """Make the prepared weight from which `state` was taken, without the plain weight.

        The tensors meet `state_specs(shape)` and start at multiples of 64 bytes; they may lie in a file that is mapped
        for reading.
        """

    def zeros(self, spec: TensorSpec, device: torch.device | str) -> Tensor:
        """Return long-lived memory for a tensor of a state."""
        return zeroed(spec.shape, spec.dtype, device)

    @abstractmethod
    def pack_into(self, state: Mapping[str, Tensor], weight: Tensor, bias: Tensor | None, *, gated: bool) -> None:
        """Write the `state` of this weight to tensors of zeros that meet `state_specs`."""

    def restore_stack(self, shape: LinearShape, state: Mapping[str, Tensor], first: int = 0) -> PreparedStack:
        """Make a stack of weights of one shape; each tensor of `state` has a further dimension, of experts, in front.

        first: the number of the first expert.
        """
        return linear_stack(self.restore, shape, state, first)


def with_bias(specs: dict[str, TensorSpec], shape: LinearShape) -> dict[str, TensorSpec]:
    """Return the specs of a state, with that of the bias where the weight has one."""
    return {**specs, "bias": TensorSpec((shape.outputs,), shape.dtype)} if shape.has_bias else specs


def linear_stack(
    restore: Callable[[LinearShape, Mapping[str, Tensor]], PreparedLinear],
    shape: LinearShape,
    state: Mapping[str, Tensor],
    first: int,
) -> PreparedStack:
    """Make a stack whose weights are restored one by one."""
    experts = range(len(next(iter(state.values()))))
    return LinearStack(
        [restore(shape, {name: tensor[each] for name, tensor in state.items()}) for each in experts],
        state,
        first,
    )


_ROWS_PER_THREAD: Final = 16


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias` [tokens, outputs] for x [tokens, inputs], weight [outputs, inputs], bias [outputs].

    A row has the same bits whatever its neighbours are. In float32 on a CPU that takes 16 rows for each thread: with
    fewer (four without AVX-512), MKL makes the product by another routine, which sums in another order.
    """
    tokens = x.shape[0]
    is_grouped = x.dtype is torch.float32 and x.device.type == "cpu"
    missing = -tokens % (_ROWS_PER_THREAD * torch.get_num_threads()) if is_grouped else 0
    if missing:
        return F.linear(F.pad(x, (0, 0, 0, missing)), weight, bias)[:tokens]
    return F.linear(x, weight, bias)


class PlainLinear(PreparedLinear):
    """The weight as the checkpoint has it, multiplied by torch. State: `weight` [outputs, inputs], perhaps `bias`."""

    def __init__(
        self, shape: LinearShape, state: Mapping[str, Tensor], activate: Callable[[Tensor], Tensor] = silu_and_mul
    ) -> None:
        """activate: returns silu(gate) * up of the product of a gated weight."""
        super().__init__(shape, state)
        self._activate = activate

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        product = linear(x, self._state["weight"], self._state.get("bias"))
        if add is not None:
            product = (product + add).to(x.dtype)
        return self._activate(product) if self.shape.is_gated else product

    def by_head(self, x: Tensor, outputs: int) -> Tensor:
        heads = self._state["weight"].view(x.shape[1], -1, self.shape.inputs)
        return torch.stack([linear(x[:, i].contiguous(), weight[:outputs]) for i, weight in enumerate(heads)], dim=1)

    def rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._state["weight"])


class PlainFormat(LinearFormat):
    """Keeps weights as they are: the reference in plain torch, which defines the right result."""

    layout = "plain/1"

    def state_specs(self, shape: LinearShape) -> dict[str, TensorSpec]:
        return with_bias({"weight": TensorSpec((shape.outputs, shape.inputs), shape.dtype)}, shape)

    def restore(self, shape: LinearShape, state: Mapping[str, Tensor]) -> PreparedLinear:
        return PlainLinear(shape, state)

    def pack_into(self, state: Mapping[str, Tensor], weight: Tensor, bias: Tensor | None, *, gated: bool) -> None:
        state["weight"].copy_(weight)
        if bias is not None:
            state["bias"].copy_(bias)


def examples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Yield (x, ids, weight, bias, gated, add): one token, a few, more than a tile; widths that are no whole tiles."""
    generator = torch.Generator().manual_seed(0)
    for tokens, inputs, outputs in ((1, 64, 96), (3, 40, 18), (33, 128, 160)):
        x, weight = (torch.randn(shape, generator=generator) for shape in ((tokens, inputs), (outputs, inputs)))
        ids = torch.tensor([0, outputs - 1, outputs // 2, 0])
        x, weight = x.to(dtype), (weight / inputs**0.5).to(dtype)
        bias = torch.randn(outputs, generator=generator).to(dtype)
        add = torch.randn(tokens, outputs, generator=generator)
        for gated in (False, True):
            yield x, ids, weight, None, gated, None
            yield x, ids, weight, bias, gated, None
            yield x, ids, weight, bias, gated, add


def trial(
    prepare: Callable[..., PreparedLinear],
    x: Tensor,
    ids: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gated: bool,
    add: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return (the product, rows of the weight) of one list of `examples`."""
    prepared = prepare(weight, bias, gated=gated)
    return prepared(x, add), prepared.rows(ids)


OPERATORS = (Operator("prepare_linear", PlainFormat(), examples, trial=trial),)
