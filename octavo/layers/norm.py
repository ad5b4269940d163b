"""Normalisation layers. `add` also updates the residual stream, which a backend fuses."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from octavo.layers.layer import Binding, Layer


class Norm(Layer):
    """Normalises x [..., dim] by an operator, and scales it by a learned weight [dim]."""

    OPERATOR: ClassVar[str]

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim), requires_grad=False)
        self.eps = eps
        self._norm: Callable[..., Any]
        self._add_norm: Callable[..., Any]

    @abstractmethod
    def learned(self) -> tuple[Tensor, ...]:
        """Return the parameters in the order of the operator."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised x [..., dim]."""
        normed: Tensor = self._norm(x, *self.learned(), self.eps)
        return normed

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (norm of `x + residual`, `x + residual`), each [tokens, dim]; x starts the stream if there is none."""
        if residual is None:
            return self(x), x
        normed, residual = self._add_norm(x, residual, *self.learned(), self.eps)
        return normed, residual

    def bind(self, binding: Binding) -> None:
        """See `Layer.bind`."""
        self._norm = getattr(binding.ops, self.OPERATOR)
        self._add_norm = getattr(binding.ops, f"add_{self.OPERATOR}")


class RMSNorm(Norm):
    """Scales x by its root mean square and a learned weight [dim]."""

    OPERATOR = "rms_norm"

    def learned(self) -> tuple[Tensor, ...]:
        """See `Norm.learned`."""
        return (self.weight,)


class LayerNorm(Norm):
    """Centres x and scales it by its standard deviation, a learned weight [dim] and bias [dim]."""

    OPERATOR = "layer_norm"

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__(dim, eps)
        self.bias = nn.Parameter(torch.empty(dim), requires_grad=False)

    def learned(self) -> tuple[Tensor, ...]:
        """See `Norm.learned`."""
        return self.weight, self.bias
