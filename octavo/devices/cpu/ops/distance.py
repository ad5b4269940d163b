"""Attention of whole prompts by distance: the kernels of paged attention over memory that only one call uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octavo.devices.cpu.attention import TILE_KEYS, CpuBackend, token_stride
from octavo.devices.cpu.runtime import TYPE_CODES, CpuRuntime, dense, lacks
from octavo.ops import distance
from octavo.ops.registry import Implementation

_CHUNK_KEYS = 64


def make_distance_attention(runtime: CpuRuntime) -> Callable[..., Tensor]:
    """Make `octavo.ops.distance.distance_attention`; of heads that the kernels do not take, the reference."""
    cpu, empty = runtime.cpu, runtime.empty

    def distance_attention(
        q: Tensor, k: Tensor, v: Tensor, biases: Tensor, lengths: Sequence[int], scale: float
    ) -> Tensor:
        (tokens, heads, dim), kv_heads, dtype = q.shape, k.shape[1], q.dtype
        if CpuBackend.obstacle(dtype, dtype, [dim], TILE_KEYS) is not None:
            return distance.distance_attention(q, k, v, biases, lengths, scale)
        assert sum(lengths) == tokens, f"prompts have {sum(lengths)} tokens, q has {tokens}"
        code, biases = TYPE_CODES[dtype], dense(biases)
        tiles = sum(-(-length // TILE_KEYS) for length in lengths)
        block_bytes = cpu.attention_block_bytes(kv_heads, dim, 0, TILE_KEYS, code)
        cache = empty((tiles * block_bytes,), torch.uint8)
        table = empty((heads, 2 * max(lengths, default=1) + _CHUNK_KEYS), torch.float32)
        out, counts = empty((tokens, heads, dim), dtype), torch.tensor(lengths, dtype=torch.int32)
        cpu.distance_attention(
            *(each.data_ptr() for each in (q, k, v, out, cache, table, biases)),
            *(biases.shape[1] // 2, counts.data_ptr(), len(lengths)),
            *(token_stride(each) for each in (q, k, v)),
            *(heads, kv_heads, dim, code, scale),
        )
        return out

    return distance_attention


IMPLEMENTATIONS = (
    Implementation("distance_attention", "native", make_distance_attention, lacks("distance_attention")),
)
