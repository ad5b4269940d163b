"""Normalisation layers. `add` also updates the residual stream, which a backend fuses."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from octavo.distributed.mesh import Mesh
from octavo.layers.layer import WHOLE, Binding, Layer, TensorSlot
from octavo.ops.prepare_linear import TensorSpec
from octavo.ops.registry import Ops


class Norm(Layer):
    """Normalises x [..., dim] and scales it by a learned weight [dim]."""

    is_stored: ClassVar[bool] = True
    """False for a norm that reads no tensor, whose weight is all ones."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim), requires_grad=False)
        self.eps = eps

    def bind(self, binding: Binding) -> None:
        """Store the operators, and the weight where none is read."""
        super().bind(binding)
        if not self.is_stored:
            ones = torch.ones(self.weight.shape, dtype=self.weight.dtype, device=binding.device)
            self.weight = nn.Parameter(ones, requires_grad=False)

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        return super().tensor_slots(path) if self.is_stored else iter(())

    def state_specs(self, ops: Ops) -> dict[str, TensorSpec]:
        return super().state_specs(ops) if self.is_stored else {}

    def state(self) -> dict[str, Tensor]:
        return super().state() if self.is_stored else {}

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised x [..., dim]."""

    @abstractmethod
    def add_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm of `x + residual`, `x + residual`), each [tokens, dim]."""

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (norm of `x + residual`, `x + residual`), each [tokens, dim]; x starts the stream if there is none."""
        return (self(x), x) if residual is None else self.add_norm(x, residual)


class RMSNorm(Norm):
    """Scales x by its root mean square and a learned weight [dim], to which `offset` is added."""

    def __init__(self, dim: int, eps: float, *, offset: float = 0.0) -> None:
        super().__init__(dim, eps)
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps, self.offset)

    def add_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        normed, residual = self.ops.add_rms_norm(x, residual, self.weight, self.eps, self.offset)
        return normed, residual


class LayerNorm(Norm):
    """Centres x and scales it by its standard deviation, a learned weight [dim] and bias [dim], which may be absent.

    `offset` is added to the stored weight when it is loaded.
    """

    def __init__(self, dim: int, eps: float, *, bias: bool = True, offset: float = 0.0) -> None:
        super().__init__(dim, eps)
        self.bias = nn.Parameter(torch.empty(dim), requires_grad=False) if bias else None
        self._offset = offset

    def hold(self, name: str, value: Tensor) -> None:
        super().hold(name, value.to(self.weight.dtype) + self._offset if name == "weight" and self._offset else value)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        normed, residual = self.ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps)
        return normed, residual


class ScaledNorm(RMSNorm):
    """An `RMSNorm` whose result is multiplied with a number."""

    def __init__(self, dim: int, eps: float, factor: float) -> None:
        super().__init__(dim, eps)
        self._factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.scaled(super().forward(x), self._factor)


class UnscaledRMSNorm(RMSNorm):
    """Scales x by its root mean square alone."""

    is_stored = False


class UnscaledLayerNorm(LayerNorm):
    """Centres x and scales it by its standard deviation alone."""

    is_stored = False

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__(dim, eps, bias=False)


class WidthNorm(RMSNorm):
    """Scales the heads of a token by the root mean square of all of them together, and a learned weight.

    `count` heads of size `dim` in all; `share` is (start, length) of this rank's part of their width. The ranks
    exchange their heads, so that one rank sums up each square, as if there were no others.
    """

    def __init__(self, count: int, dim: int, eps: float, mesh: Mesh, share: tuple[int, int]) -> None:
        super().__init__(count * dim, eps)
        self._mesh, self._dim, self._share = mesh, dim, share
        # a head that several ranks have counts once
        self._repeats = mesh.tensor.size * share[1] // (count * dim)

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, heads, dim] → the same shape."""
        tokens, (start, length) = len(x), self._share
        whole = x.flatten(1)
        if self._mesh.tensor.size > 1:
            whole = self._mesh.gather(self.ops.scaled(whole, 1.0))  # a copy, for shares lie side by side
        if self._repeats > 1:
            whole = self.ops.scaled(whole.view(-1, length)[:: self._repeats], 1.0).view(tokens, -1)
        normed: Tensor = self.ops.rms_norm(whole, self.weight, self.eps)
        return normed[:, start : start + length].view(tokens, -1, self._dim)


class WidthLayerNorm(LayerNorm):
    """Centres and scales the heads of a token, all of them together."""

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, heads, dim] → the same shape."""
        return super().forward(x.flatten(1)).view(x.shape)


class HeadLayerNorm(LayerNorm):
    """A `LayerNorm` without bias for every head of [tokens, heads, dim], each with a weight of its own.

    `count` heads in all, of which this rank has `own`. They are stored as one tensor [count, dim], or as
    `norms.<head>.weight` where `is_apart`.
    """

    def __init__(self, count: int, own: range, dim: int, eps: float, *, is_apart: bool = False) -> None:
        super().__init__(dim, eps, bias=False)
        self.weight = nn.Parameter(torch.empty(len(own), dim), requires_grad=False)
        self._count, self._own, self._is_apart = count, own, is_apart

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        """Yield the stored weights, of which this rank reads those of its heads."""
        dim, own = self.weight.shape[1], self._own
        if not self._is_apart:
            rows = slice(own.start, own.stop)
            yield TensorSlot(
                f"{path}.weight", (self._count, dim), lambda stored: self.hold("weight", stored[rows]), parts=((rows,),)
            )
            return
        for head in range(self._count):
            parts = WHOLE if head in own else ()
            yield TensorSlot(f"{path}.norms.{head}.weight", (dim,), partial(self._fill, head), parts=parts)

    def _fill(self, head: int, stored: Tensor) -> None:
        if head in self._own:
            self.room("weight", stored.device)[head - self._own.start].copy_(stored)
