"""Rows of a table, copied."""

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


IMPLEMENTATIONS = (Implementation("embedding", "native", make_embedding),)
