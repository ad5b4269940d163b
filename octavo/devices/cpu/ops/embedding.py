"""Rows of a table, copied, and those of one rank's share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.devices.cpu.runtime import CpuRuntime, dense
from octavo.ops.registry import Implementation


def make_embedding(runtime: CpuRuntime) -> Callable[..., Tensor]:
    """Return `octavo.ops.embedding.embedding` on the compiled library, for tables of any type."""
    kernel, empty = runtime.cpu.embedding, runtime.empty

    def embedding(ids: Tensor, weight: Tensor, offset: int = 0) -> Tensor:
        assert ids.dtype is torch.int64, "tokens and positions are int64"
        dtype = weight.dtype
        rows, dim = weight.shape
        ids, weight = dense(ids), dense(weight)
        tokens = ids.shape[0]
        out = empty((tokens, dim), dtype)
        kernel(ids.data_ptr(), offset, weight.data_ptr(), rows, dim * dtype.itemsize, out.data_ptr(), tokens)
        return out

    return embedding


def make_share_ids(runtime: CpuRuntime) -> Callable[..., Tensor]:
    """Return `octavo.ops.vocabulary.share_ids` on the compiled library."""
    kernel, empty = runtime.cpu.share_ids, runtime.empty

    def share_ids(ids: Tensor, start: int, rows: int, total: int) -> Tensor:
        assert ids.dtype is torch.int64, "tokens are int64"
        ids = dense(ids)
        out = empty((ids.shape[0],), torch.int64)
        kernel(ids.data_ptr(), out.data_ptr(), ids.shape[0], start, rows, total)
        return out

    return share_ids


def make_share_rows(runtime: CpuRuntime) -> Callable[..., Tensor]:
    """Return `octavo.ops.vocabulary.share_rows` on the compiled library."""
    kernel = runtime.cpu.share_rows

    def share_rows(found: Tensor, ids: Tensor, start: int, rows: int) -> Tensor:
        assert found.is_contiguous(), "rows that are written over lie side by side"
        tokens, dim = found.shape
        kernel(dense(ids).data_ptr(), found.data_ptr(), tokens, dim * found.element_size(), start, rows)
        return found

    return share_rows


IMPLEMENTATIONS = (
    Implementation("embedding", "native", make_embedding),
    Implementation("share_ids", "native", make_share_ids),
    Implementation("share_rows", "native", make_share_rows),
)
