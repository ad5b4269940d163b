"""Addition of two tensors: the residual stream where no norm follows, and embeddings of tokens and positions."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from octavo.ops.registry import Operator


def add(x: Tensor, y: Tensor) -> Tensor:
    """`x + y`, each [tokens, dim] in one type, rounded once."""
    return x + y


def examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """One token and several."""
    generator = torch.Generator().manual_seed(0)
    for tokens, dim in ((1, 64), (5, 41)):
        yield tuple(torch.randn(2, tokens, dim, generator=generator).to(dtype).unbind())  # type: ignore[misc]


OPERATORS = (Operator("add", add, examples),)
