"""Paged attention on the compiled library: one kernel for prefill, pieces of it and decoding, in any mixture.

Keys are summed up in an order that is fixed by their absolute positions (csrc/cpu/attention/attention.h), so a token's
result has the same bits however a step was composed and however many threads compute it.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from octavo.attention.backend import Parts, Scores, StepSizes
from octavo.attention.cache_format import is_quantized
from octavo.attention.metadata import AttentionMetadata
from octavo.devices.cpu.runtime import CpuRuntime

TILE_KEYS = 16
"""A block holds a multiple of this many tokens."""
_MAX_HEAD_DIM = 1024
_ALL_KEYS = 2**31 - 1
_TYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float8_e4m3fn: 3}


class CpuBackend:
    """`AttentionBackend` on compiled kernels, for float32 and bfloat16 models.

    `cache_dtype` is the type of the cached values: float32, bfloat16, or int8 and float8_e4m3fn, which have a float32
    scale per token and head beside them in their block.
    """

    name = "native"

    def __init__(self, runtime: CpuRuntime, cache_dtype: torch.dtype) -> None:
        self._cpu = runtime.cpu
        self._kernel = runtime.cpu.attention
        self._latent_kernel = runtime.cpu.latent_attention
        self._empty = runtime.empty
        self._cache_code = _TYPE_CODES[cache_dtype]
        self.element_type = torch.uint8 if is_quantized(cache_dtype) else cache_dtype

    @staticmethod
    def obstacle(
        dtype: torch.dtype, cache_dtype: torch.dtype, head_dims: Collection[int], block_size: int
    ) -> str | None:
        """Return why the kernels cannot serve such a model; None where they can."""
        if dtype not in (torch.float32, torch.bfloat16):
            return f"the kernels compute in float32 and bfloat16, the model in {dtype}".replace("torch.", "")
        if cache_dtype not in _TYPE_CODES:
            return f"the kernels have no cache of {cache_dtype}".replace("torch.", "")
        unfit = [str(size) for size in sorted(head_dims) if size % 8 or size > _MAX_HEAD_DIM]
        if unfit:
            sizes = f"multiples of 8 up to {_MAX_HEAD_DIM:,}, not {' and '.join(unfit)}"
            return f"the kernels take head sizes that are {sizes}"
        if block_size % TILE_KEYS:
            return f"the kernels take block sizes that are multiples of {TILE_KEYS}, not {block_size}"
        return None

    def cache_shape(
        self, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, value_size: int = 0
    ) -> tuple[int, ...]:
        """Return [1, num_blocks, elements of a block]: tiles of 16 keys, values and scales; see attention.h."""
        block_bytes = self._cpu.attention_block_bytes(kv_heads, head_dim, value_size, block_size, self._cache_code)
        return 1, num_blocks, block_bytes // self.element_type.itemsize

    def workspace_bytes(self, sizes: StepSizes) -> int:
        """Return the bytes of tiles, scores and sums of the items at work."""
        of_heads = sizes.num_heads, sizes.kv_heads, sizes.head_dim, sizes.value_size
        scratch: int = self._cpu.attention_scratch_bytes(*of_heads, sizes.max_length, self._cache_code)
        return scratch

    def gathered_bytes(self, sizes: StepSizes, num_keys: int) -> int:
        """Return the bytes of the tiles of each thread's query, and of what `workspace_bytes` counts."""
        of_heads = sizes.num_heads // sizes.kv_heads, sizes.head_dim, sizes.value_size
        # an older library computes by torch
        count = getattr(self._cpu, "gathered_scratch_bytes", None)
        scratch: int = 0 if count is None else count(*of_heads, num_keys, _TYPE_CODES[torch.float32])
        return scratch

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, metadata: AttentionMetadata, scores: Scores
    ) -> Tensor:
        tokens, heads, dim = q.shape
        kv_heads = k.shape[1]
        out = self._empty((tokens, heads, dim), q.dtype)
        tables = metadata.block_tables
        assert q.dtype is k.dtype is v.dtype
        self._kernel(
            *(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()),  # that of k is 0 where it is empty
            *_places(cache, metadata),
            *(0 if each is None else each.data_ptr() for each in (scores.alibi, scores.sinks)),
            *(token_stride(q), token_stride(k), token_stride(v), tables.stride(0)),
            *(cache.stride(1) * cache.element_size(), tokens, tables.shape[0], heads, kv_heads, dim),
            *(metadata.block_size, _TYPE_CODES[q.dtype], self._cache_code, scores.scale),
            *(_ALL_KEYS if scores.sliding_window is None else scores.sliding_window, scores.soft_cap or 0.0),
            scores.ahead,
        )
        return out

    def run_latents(self, q: Parts, latents: Parts, cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
        tokens, heads, value_size = q[0].shape
        out = self._empty((tokens, heads, value_size), q[0].dtype)
        tables = metadata.block_tables
        self._latent_kernel(
            *(each.data_ptr() for each in (*q, *latents, out)),
            *_places(cache, metadata),
            *(token_stride(each) for each in q),
            *(each.stride(0) for each in (*latents, tables)),
            *(cache.stride(1) * cache.element_size(), tokens, tables.shape[0], heads),
            *(value_size + q[1].shape[2], value_size, metadata.block_size),
            *(_TYPE_CODES[out.dtype], self._cache_code, scale),
        )
        return out


def _places(cache: Tensor, metadata: AttentionMetadata) -> tuple[int, ...]:
    """Return the addresses of a cache, and of where the tokens of a step are in it."""
    starts, lengths = metadata.query_starts, metadata.sequence_lengths
    return tuple(each.data_ptr() for each in (cache, starts, lengths, metadata.block_tables, metadata.slot_mapping))


def token_stride(x: Tensor) -> int:
    """Return the elements between tokens of x [tokens, heads, dim], whose heads must lie side by side."""
    assert x.stride()[1:] == (x.shape[2], 1), "kernels read tokens whose heads lie side by side"
    return x.stride(0)
