"""Rows of a table that ranks share: those of other ranks are zeros, so that the sum over the ranks is exact."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from octavo.ops.registry import Operator


def share_ids(ids: Tensor, start: int, rows: int, total: int) -> Tensor:
    """Return `ids - start` int64 [tokens] where that is one of `rows`, else 0.

    For an id outside [0, total) it is -1, which no table has.
    """
    elsewhere = torch.where((ids >= 0) & (ids < total), 0, -1)
    return torch.where((ids >= start) & (ids < start + rows), ids - start, elsewhere)


def share_rows(found: Tensor, ids: Tensor, start: int, rows: int) -> Tensor:
    """Return `found` [tokens, dim], whose rows are set to zeros where `ids` [tokens] lie outside [start, start + rows).

    `found` is written over.
    """
    own = (ids >= start) & (ids < start + rows)
    return found.masked_fill_(~own.unsqueeze(1), 0)


def id_examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, int, int, int]]:
    """Yield ids of three shares, the last one cut short."""
    ids = torch.tensor([0, 9, 3, 4, 7, 7, 8, 10, -1])
    for start, rows in ((0, 4), (4, 4), (8, 4), (10, 0)):
        yield ids, start, rows, 10


def row_examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, int, int]]:
    """Yield rows of which all, some or none are this rank's."""
    for _, start, rows, _ in id_examples(dtype):
        yield torch.ones(7, 24, dtype=dtype), torch.tensor([0, 9, 3, 4, 7, 7, 8]), start, rows


_EXACT = dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), 0.0)

OPERATORS = (
    Operator("share_ids", share_ids, id_examples, _EXACT),
    Operator("share_rows", share_rows, row_examples, _EXACT),
)
