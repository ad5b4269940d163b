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


def make_disentangled_attention(runtime: CpuRuntime) -> Callable[..., Tensor]:
    """Make `octavo.ops.distance.disentangled_attention`; of heads that the kernels do not take, the reference."""
    cpu, empty = runtime.cpu, runtime.empty

    def disentangled_attention(
        content: tuple[Tensor, Tensor, Tensor],
        places: tuple[Tensor, Tensor],
        rows: Tensor,
        lengths: Sequence[int],
        scale: float,
    ) -> Tensor:
        (tokens, heads, dim), dtype, num_places = content[0].shape, content[0].dtype, len(places[0])
        if CpuBackend.obstacle(dtype, dtype, [dim], TILE_KEYS) is not None:
            return distance.disentangled_attention(content, places, rows, lengths, scale)
        longest, reach = max(lengths, default=1), len(rows) // 2
        assert sum(lengths) == tokens, f"prompts have {sum(lengths)} tokens, q has {tokens}"
        assert longest <= reach + 1, f"a prompt has {longest} tokens, the rows reach {reach}"
        # vectors of distances have 32 bits where products have
        code, sizes = TYPE_CODES[dtype], [TYPE_CODES[dtype], *[TYPE_CODES[torch.float32]] * 2]
        tiles = [sum(-(-length // TILE_KEYS) for length in lengths), *[-(-num_places // TILE_KEYS)] * 2]
        caches = [
            empty((count * cpu.attention_block_bytes(heads, dim, 0, TILE_KEYS, size),), torch.uint8)
            for count, size in zip(tiles, sizes, strict=True)
        ]
        memory = empty((cpu.disentangled_bytes(longest, num_places),), torch.uint8)
        out, counts = empty((tokens, heads, dim), dtype), torch.tensor(lengths, dtype=torch.int32)
        cpu.disentangled_attention(
            *(each.data_ptr() for each in (*content, out, caches[0], *places, *caches[1:], memory, rows)),
            *(reach, num_places, counts.data_ptr(), len(lengths)),
            *(token_stride(each) for each in (*content, *places)),
            *(heads, dim, code, scale),
        )
        return out

    return disentangled_attention


IMPLEMENTATIONS = (
    Implementation("distance_attention", "native", make_distance_attention, lacks("distance_attention")),
    Implementation("disentangled_attention", "native", make_disentangled_attention, lacks("disentangled_attention")),
)
