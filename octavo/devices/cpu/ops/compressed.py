"""Attention to compressed tokens, and the choice of their windows.

Types and sizes that the kernels do not take are left to the references.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octavo.devices.cpu.attention import TILE_KEYS, CpuBackend, token_stride
from octavo.devices.cpu.ops.chosen_tokens import Keys, choose_keys
from octavo.devices.cpu.runtime import FLOAT_TYPES, TYPE_CODES, CpuRuntime, lacks
from octavo.ops import compressed
from octavo.ops.compressed import Sight, SmallQueries
from octavo.ops.recurrent import TokenRows
from octavo.ops.registry import Implementation


def make_choose_pools(runtime: CpuRuntime) -> Callable[..., Tensor]:
    """Make `octavo.ops.compressed.choose_pools`; of other types the reference."""

    def choose_pools(
        small: SmallQueries, cache: Tensor, metadata: TokenRows, rate: int, num_chosen: int, num_tokens: int
    ) -> Tensor:
        if small.queries.dtype not in FLOAT_TYPES or cache.dtype not in FLOAT_TYPES:
            return compressed.choose_pools(small, cache, metadata, rate, num_chosen, num_tokens)
        chosen = runtime.empty((len(small.queries), num_tokens), torch.int32)
        choose_keys(runtime, small, Keys(cache, metadata, rate), num_chosen, chosen, names_tokens=True)
        return chosen

    return choose_pools


def make_compressed_attention(runtime: CpuRuntime) -> Callable[..., Tensor]:
    """Make `octavo.ops.compressed.compressed_attention`; of other types and sizes the reference."""
    cpu, empty = runtime.cpu, runtime.empty

    def compressed_attention(
        q: Tensor,
        caches: Sequence[Tensor],
        metadata: Sequence[TokenRows],
        by: Sight,
        sinks: Tensor,
        small: SmallQueries | None = None,
    ) -> Tensor:
        (tokens, heads, dim), dtype, recent, rows = q.shape, q.dtype, caches[0], metadata[0]
        is_one_type = all(each.dtype is recent.dtype for each in caches) and recent.dtype in FLOAT_TYPES
        if not is_one_type or CpuBackend.obstacle(dtype, dtype, [dim], TILE_KEYS) is not None:
            return compressed.compressed_attention(q, caches, metadata, by, sinks, small)
        out, chosen = empty((tokens, heads, dim), dtype), None
        if small is not None and by.num_chosen is not None:
            chosen = empty((tokens, by.num_chosen), torch.int32)
            choose_keys(runtime, small, Keys(caches[1], metadata[1], by.rate, dim), by.num_chosen, chosen)
        if out.is_meta:
            return out
        vectors, tables, num_vectors = recent, rows.block_tables, rows.block_size
        if by.rate:
            vectors, tables = caches[1], metadata[1].block_tables
            num_vectors = -(-metadata[1].block_size // by.rate)
        width, code = recent.element_size(), TYPE_CODES[dtype]
        cpu.gathered_attention(
            *(q.data_ptr(), 0, out.data_ptr(), rows.query_starts.data_ptr(), rows.sequence_lengths.data_ptr()),
            *(sinks.data_ptr(), vectors.data_ptr(), tables.data_ptr(), recent.data_ptr(), rows.block_tables.data_ptr()),
            *(0 if chosen is None else chosen.data_ptr(), token_stride(q), 0, tables.stride(0)),
            *(vectors.stride(0) * width, vectors.shape[1] // num_vectors * width, rows.block_tables.stride(0)),
            *(recent.stride(0) * width, recent.shape[1] // rows.block_size * width),
            *(by.rate, by.num_chosen or 0, by.window, rows.block_size, tokens, len(rows.block_tables), heads, dim, dim),
            *(code, TYPE_CODES[recent.dtype], by.scale),
        )
        return out

    return compressed_attention


IMPLEMENTATIONS = (
    Implementation("choose_pools", "native", make_choose_pools, lacks("choose_windows")),
    Implementation("compressed_attention", "native", make_compressed_attention, lacks("gathered_attention")),
)
