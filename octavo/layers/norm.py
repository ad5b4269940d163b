"""Normalisation layers. `add` also updates the residual stream, which a backend fuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from octavo.layers.layer import Binding, Layer


class RMSNorm(Layer):
    """Scales x by its root mean square and a learned weight [dim]."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim), requires_grad=False)
        self.eps = eps
        self._norm: Callable[..., Any]
        self._add_norm: Callable[..., Any]

    def forward(self, x: Tensor) -> Tensor:
        """The normalised x [..., dim]."""
        normed: Tensor = self._norm(x, self.weight, self.eps)
        return normed

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm of `x + residual`, `x + residual`), each [tokens, dim]; without a residual x starts the stream."""
        if residual is None:
            return self(x), x
        normed, residual = self._add_norm(x, residual, self.weight, self.eps)
        return normed, residual

    def bind(self, binding: Binding) -> None:
        """Take the operators."""
        self._norm, self._add_norm = binding.ops.rms_norm, binding.ops.add_rms_norm


class LayerNorm(Layer):
    """Centres x and scales it by its standard deviation, a learned weight [dim] and bias [dim]."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(dim), requires_grad=False)
        self.eps = eps
        self._norm: Callable[..., Any]
        self._add_norm: Callable[..., Any]

    def forward(self, x: Tensor) -> Tensor:
        """The normalised x [tokens, dim]."""
        normed: Tensor = self._norm(x, self.weight, self.bias, self.eps)
        return normed

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm of `x + residual`, `x + residual`), each [tokens, dim]; without a residual x starts the stream."""
        if residual is None:
            return self(x), x
        normed, residual = self._add_norm(x, residual, self.weight, self.bias, self.eps)
        return normed, residual

    def bind(self, binding: Binding) -> None:
        """Take the operators."""
        self._norm, self._add_norm = binding.ops.layer_norm, binding.ops.add_layer_norm
