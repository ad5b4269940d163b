"""Normalisation layers. `add` also updates the residual stream, which a backend fuses."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from octavo.layers.layer import Layer


class Norm(Layer):
    """Normalises x [..., dim] and scales it by a learned weight [dim]."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim), requires_grad=False)
        self.eps = eps

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
        normed: Tensor = self.ops.rms_norm(x, self.weight, self.eps, self.offset)
        return normed

    def add_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        normed, residual = self.ops.add_rms_norm(x, residual, self.weight, self.eps, self.offset)
        return normed, residual


class LayerNorm(Norm):
    """Centres x and scales it by its standard deviation, a learned weight [dim] and bias [dim], which may be absent."""

    def __init__(self, dim: int, eps: float, *, bias: bool = True) -> None:
        super().__init__(dim, eps)
        self.bias = nn.Parameter(torch.empty(dim), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.ops.layer_norm(x, self.weight, self.bias, self.eps)
        return normed

    def add_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        normed, residual = self.ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps)
        return normed, residual
