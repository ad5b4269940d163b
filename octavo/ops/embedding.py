"""Rows of a table by index: token embeddings and learned positions."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.registry import Operator


def embedding(ids: Tensor, weight: Tensor, offset: int = 0) -> Tensor:
    """Return `weight[ids + offset]` [tokens, dim] for ids int64 [tokens] and weight [rows, dim].

    Raises IndexError for a row that does not exist.
    """
    return F.embedding(ids + offset if offset else ids, weight)


def examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield the first and the last row, and repeats."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(50, 24, generator=generator).to(dtype)
    yield torch.tensor([0]), weight, 0
    yield torch.tensor([49, 0, 7, 7, 31]), weight, 0
    yield torch.tensor([47, -2]), weight, 2


OPERATORS = (
    Operator("embedding", embedding, examples, dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), 0.0)),
)
