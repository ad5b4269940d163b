"""The choice of tokens, and attention to them by the kernel of paged attention over tiles of what queries chose.

Tokens that a query chose are a sequence of its own for that kernel; so the order of sums is that of its keys over the
chosen tokens (csrc/cpu/attention/attention.h), and a query's result has the same bits in any step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from octavo.attention.backend import Parts
from octavo.devices.cpu.attention import TILE_KEYS, CpuBackend, token_stride
from octavo.devices.cpu.runtime import FLOAT_TYPES, TYPE_CODES, CpuRuntime, dense, lacks
from octavo.ops import chosen_tokens
from octavo.ops.chosen_tokens import SmallHeads
from octavo.ops.recurrent import TokenRows
from octavo.ops.registry import Implementation


class Small(Protocol):
    """The small queries that choose tokens, [tokens, heads, size], and the weight of each, float32 [tokens, heads]."""

    @property
    def queries(self) -> Tensor: ...
    @property
    def weights(self) -> Tensor: ...


class Keys(NamedTuple):
    """The place of small keys in a cache [blocks, values]: every `rate` tokens have a vector, and the key follows its
    first `begin` values."""

    cache: Tensor
    metadata: TokenRows
    rate: int = 1
    begin: int = 0


def choose_keys(
    runtime: CpuRuntime, small: Small, keys: Keys, count: int, chosen: Tensor, *, names_tokens: bool = False
) -> None:
    """Choose the `count` best keys for each query: `chosen` int32 [tokens, count] becomes their numbers, in ascending
    order. names_tokens: [tokens, more], which becomes what `octavo.ops.compressed.choose_pools` returns."""
    (_, heads, size), code, width = small.queries.shape, TYPE_CODES[small.queries.dtype], keys.cache.element_size()
    own_code, block_size, rate = TYPE_CODES[keys.cache.dtype], keys.metadata.block_size, keys.rate
    if chosen.is_meta:
        runtime.cpu.choose_windows(*(0,) * 12, heads, size, *(0,) * 6)
        return
    weights, num_values = dense(small.weights), keys.cache.shape[1] // -(-block_size // rate)
    first = keys.cache.data_ptr() + keys.begin * width
    metadata, token = keys.metadata, 0
    for table, length, num_tokens in zip(metadata.block_tables, metadata.lengths, metadata.query_lengths, strict=True):
        num_keys, end = max(1, length // rate), token + num_tokens
        step = max(1, chosen_tokens.MOST_SCORES // num_keys)
        while token < end:
            part = min(step, end - token)
            scores = runtime.empty((part, num_keys), torch.float32)
            runtime.cpu.choose_windows(
                *(small.queries[token:].data_ptr(), weights[token:].data_ptr(), first, table.data_ptr()),
                *(scores.data_ptr(), chosen[token:].data_ptr(), token_stride(small.queries)),
                *(keys.cache.stride(0) * width, num_values * width, num_keys, part, length - (end - token)),
                *(heads, size, block_size, rate, count, chosen.shape[1] if names_tokens else 0, code, own_code),
            )
            token += part


def make_choose_tokens(runtime: CpuRuntime) -> Callable[..., Tensor]:
    """Make `octavo.ops.chosen_tokens.choose_tokens`; of other types the reference."""

    def choose_tokens(small: SmallHeads, cache: Tensor, metadata: TokenRows, count: int) -> Tensor:
        if small.queries.dtype not in FLOAT_TYPES or cache.dtype not in FLOAT_TYPES:
            return chosen_tokens.choose_tokens(small, cache, metadata, count)
        chosen = runtime.empty((len(small.queries), count), torch.int32)
        begin = cache.shape[1] // metadata.block_size - small.keys.shape[1]
        if not chosen.is_meta:
            chosen_tokens.store(small.keys, cache, metadata, begin)
        choose_keys(runtime, small, Keys(cache, metadata, 1, begin), count, chosen)
        return chosen

    return choose_tokens


def make_attend_chosen(runtime: CpuRuntime) -> Callable[..., Tensor]:
    """Make `octavo.ops.chosen_tokens.attend_chosen`; of types and sizes that the kernels do not take, the reference."""
    cpu, empty = runtime.cpu, runtime.empty

    def attend_chosen(
        q: Parts,
        latents: Parts,
        cache: Tensor,
        metadata: TokenRows,
        chosen: Tensor,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        (tokens, heads, value_size), dtype, size = q[0].shape, q[0].dtype, q[0].shape[2] + q[1].shape[2]
        is_unfit = cache.dtype not in FLOAT_TYPES or value_size % 8
        if is_unfit or CpuBackend.obstacle(dtype, dtype, [size], TILE_KEYS) is not None:
            return chosen_tokens.attend_chosen(q, latents, cache, metadata, chosen, scale, sinks)
        out = empty((tokens, heads, value_size), dtype)
        if out.is_meta:
            return out
        chosen_tokens.store(torch.cat(latents, dim=1), cache, metadata, 0)
        tables, width = metadata.block_tables, cache.element_size()
        num_bytes = cache.stride(0) * width, cache.shape[1] // metadata.block_size * width
        cpu.gathered_attention(
            *(q[0].data_ptr(), q[1].data_ptr(), out.data_ptr(), metadata.query_starts.data_ptr()),
            *(metadata.sequence_lengths.data_ptr(), 0 if sinks is None else sinks.data_ptr()),
            *(cache.data_ptr(), tables.data_ptr(), 0, 0, chosen.data_ptr()),
            *(token_stride(each) if each.shape[2] else 0 for each in q),
            *(tables.stride(0), *num_bytes, 0, 0, 0, 1, chosen.shape[1], 0, metadata.block_size),
            *(tokens, len(tables), heads, size, value_size, TYPE_CODES[dtype], TYPE_CODES[cache.dtype], scale),
        )
        return out

    return attend_chosen


IMPLEMENTATIONS = (
    Implementation("choose_tokens", "native", make_choose_tokens, lacks("choose_windows")),
    Implementation("attend_chosen", "native", make_attend_chosen, lacks("gathered_attention")),
)
