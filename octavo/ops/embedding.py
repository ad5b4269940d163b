"""Rows of a table by index: token embeddings and learned positions."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.registry import Operator


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """`weight[ids]`: ids is int64 [tokens], weight [rows, dim]; the answer is [tokens, dim]."""
    return F.embedding(ids, weight)


def examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """The first and the last row, and repeats."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(50, 24, generator=generator).to(dtype)
    yield torch.tensor([0]), weight
    yield torch.tensor([49, 0, 7, 7, 31]), weight


OPERATORS = (
    Operator("embedding", embedding, examples, dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), 0.0)),
)
