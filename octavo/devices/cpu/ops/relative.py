"""Attention with profiles of distances: the kernel of paged attention over copies of the keys of up to 1,024 positions.

Sums are cut at absolute positions, as those of other attention (csrc/cpu/attention/attention.h), so a query's result
has the same bits in any step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch.nn.functional as F
from torch import Tensor

from octavo.devices.cpu.attention import TILE_KEYS, CpuBackend, token_stride
from octavo.devices.cpu.runtime import FLOAT_TYPES, TYPE_CODES, CpuRuntime, dense, lacks
from octavo.ops import block_sparse, relative
from octavo.ops.recurrent import TokenRows
from octavo.ops.registry import Implementation

_MARGIN: Final = 16
_MOST_RANK: Final = 256
"""Both as in `Profiles` of csrc/cpu/attention/attention.h."""
_ALL_KEYS: Final = 2**31 - 1


def make_relative_attention(runtime: CpuRuntime) -> Callable[..., Tensor]:
    """Make `octavo.ops.relative.relative_attention`; of types and sizes that the kernels do not take, the reference."""
    kernel, empty = runtime.cpu.relative_attention, runtime.empty

    def relative_attention(
        q: Tensor,
        new: tuple[Tensor, Tensor],
        profiled: tuple[Tensor, Tensor],
        cache: Tensor,
        metadata: TokenRows,
        scale: float,
        window: int | None,
    ) -> Tensor:
        (tokens, heads, dim), (k, v), (factors, profiles), dtype = q.shape, new, profiled, q.dtype
        rank, extent = profiles.shape
        obstacle = CpuBackend.obstacle(dtype, dtype, [dim], TILE_KEYS)
        if cache.dtype not in FLOAT_TYPES or rank > _MOST_RANK or factors.dtype != dtype or obstacle is not None:
            return relative.relative_attention(q, new, profiled, cache, metadata, scale, window)
        out = empty((tokens, heads, dim), dtype)
        if out.is_meta:
            return out
        block_sparse.write(k, v, k.new_empty(len(k), 0), cache, metadata)
        factors, tables, width = dense(factors), metadata.block_tables, cache.element_size()
        table = F.pad(profiles.float().flip(1), (_MARGIN, _MARGIN))
        kernel(
            *(q.data_ptr(), out.data_ptr(), metadata.query_starts.data_ptr(), metadata.sequence_lengths.data_ptr()),
            *(cache.data_ptr(), tables.data_ptr(), factors.data_ptr(), table.data_ptr()),
            *(token_stride(q), heads * rank, tables.stride(0), cache.stride(0) * width),
            *(cache.shape[1] // metadata.block_size * width, rank, extent, metadata.block_size),
            *(tokens, len(tables), heads, k.shape[1], dim, TYPE_CODES[dtype], TYPE_CODES[cache.dtype]),
            *(scale, _ALL_KEYS if window is None else window),
        )
        return out

    return relative_attention


IMPLEMENTATIONS = (
    Implementation("relative_attention", "native", make_relative_attention, lacks("relative_attention")),
)
