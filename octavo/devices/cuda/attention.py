"""Attention on CUDA: the paged cache of the reference, computed by Triton kernels."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from octavo.attention.backend import Parts, Scores, StepSizes
from octavo.attention.metadata import AttentionMetadata
from octavo.devices.cuda.ops.rows import rotate_into, rotated
from octavo.devices.cuda.runtime import CudaRuntime, compute_type, dense, power_of_2
from octavo.ops.rotary import Rotation

HEAD_DIMS: Final = (8, 576)
"""Smallest and largest head size; larger heads do not fit into an SM's shared memory together with their keys."""

ROWS: Final = 16
"""Smallest number of queries of a program: the rows that a tensor core multiplies at once."""
PREFILL_ROWS: Final = 128
"""Queries of a program that computes prompts."""
_TILE_BYTES: Final = 32 << 10
"""Bytes of a program's tile of queries, and of its tile of keys. An SM with large shared memory holds both, and the
values; a small one holds tiles of half the size."""
_HOPPER_SHARED: Final = 228 << 10
"""Bytes of shared memory of an SM from Hopper on, whose instructions multiply tiles that are not in registers."""
_VERIFIED: Final = 8
"""With invariant batches, the keys of a sequence are divided for at most so many tokens: a drawn token and the draft
tokens after it."""
_PROGRAMS: Final = 264
"""Two programs for each SM of an H100. If a step has fewer, long sequences are divided among more programs."""
_FEW: Final = 108
"""One program for each SM of an A100, which has fewer SMs than later GPUs: up to so many programs share no SM."""
STAGES_OF_FEW: Final = 5
"""Pipeline stages of a program of single tokens that has its SM for itself: it requests two tiles of keys before it
awaits the first. With three stages it requests the second after it has computed the first, and other programs of the SM
hide the wait. The number changes no bit."""
CHUNK: Final = 256
TILE: Final = 128
LONGEST: Final = "longest"
"""The key of `AttentionMetadata.once` for the length of the longest sequence."""
CODES: Final = {torch.int8: 1, torch.float8_e4m3fn: 2}
"""The numbers that kernels have for the types of codes in a cache."""
SCALE_BYTES: Final = 4
"""Bytes of the scale that is stored for each head of a token."""
_MOST_AHEAD: Final = 1 << 30
"""Most keys after its own that a query sees: kernels add positions in 32 bits."""


@dataclass(frozen=True)
class Division:
    """The division of keys into chunks and tiles. It decides the order of sums, and so the bits: all steps of an engine
    have the same."""

    chunk: int = CHUNK
    """Keys that are summed before chunks are merged."""
    tile: int = TILE
    """Keys of one product, a part of a chunk; fewer for large heads."""
    programs: int = _PROGRAMS
    """With fewer programs, sequences are divided further, which changes no bit."""


class _Part(NamedTuple):
    """The rows of a step that programs of one kind compute: all of them, or the given ones."""

    most_queries: int
    """Most tokens of a row."""
    num_tokens: int
    rows: Sequence[int] | None = None

    def longest(self, metadata: AttentionMetadata) -> int:
        """Return the length of the longest of these sequences, or the bound that a captured step has instead."""
        if self.rows is None:
            return metadata.once(LONGEST, lambda: max(metadata.lengths))
        return max(metadata.lengths[row] for row in self.rows)


class CudaBackend:
    """`AttentionBackend` in Triton. The cache is [planes, blocks, kv_heads, block_size, dim], keys and values.

    With int8 and float8_e4m3fn a head of a block has its codes first and then their scales, so codes are aligned to
    whole vectors.
    """

    name = "triton"

    def __init__(self, runtime: CudaRuntime, cache_dtype: torch.dtype, division: Division | None = None) -> None:
        self._runtime = runtime
        self._codes = CODES.get(cache_dtype, 0)
        self.element_type = torch.uint8 if self._codes else cache_dtype
        self._division = division or Division()

    @staticmethod
    def obstacle(cache_dtype: torch.dtype, head_dims: Collection[int], block_size: int = 16) -> str | None:
        """Return why the kernels cannot serve a model, and what to do; None where they can."""
        if cache_dtype in CODES and block_size % SCALE_BYTES:
            fitting = -(-block_size // SCALE_BYTES) * SCALE_BYTES
            return (
                f"block_size is {block_size}, but kernels of the device cuda read an 8-bit KV cache in blocks of a "
                f"multiple of {SCALE_BYTES} tokens: set it to {fitting}, or kv_cache_dtype to auto"
            )
        least, most = HEAD_DIMS
        odd = [dim for dim in head_dims if not least <= dim <= most]
        if not odd:
            return None
        return (
            f"device is cuda, but its kernels have head sizes from {least} to {most}, not {odd[0]}; use the device cpu"
        )

    def cache_shape(
        self, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, value_size: int = 0
    ) -> tuple[int, ...]:
        """Return [planes, num_blocks, kv_heads, block_size, dim]. With codes `dim` includes the bytes of the scale."""
        width = head_dim + (SCALE_BYTES if self._codes else 0)
        return (1 if value_size else 2, num_blocks, kv_heads, block_size, width)

    def workspace_bytes(self, sizes: StepSizes) -> int:
        """Return the bytes of the parts of divided sequences, and of a work list."""
        divided = min(sizes.max_tokens, self._division.programs)
        chunks = power_of_2(-(-sizes.max_length // self._division.chunk), least=1)
        of_parts = divided * sizes.num_heads * chunks * (sizes.head_dim + 2) * 4
        return of_parts + sizes.max_tokens * (16 + 2 * sizes.head_dim * sizes.element_size)

    def gathered_bytes(self, sizes: StepSizes, num_keys: int) -> int:
        """Return 0: torch computes attention to gathered keys."""
        return 0

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, metadata: AttentionMetadata, scores: Scores
    ) -> Tensor:
        if len(k):
            self._store(k, v, cache, metadata)
        if not metadata.query_lengths:  # nothing is read
            return q
        return self._attend(q, cache, metadata, scores, q.shape[-1])

    def run_latents(self, q: Parts, latents: Parts, cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
        new = torch.cat(latents, dim=-1)[:, None]
        self._store(new, new, cache, metadata)
        return self._attend(torch.cat(q, dim=-1), cache, metadata, Scores(scale), q[0].shape[-1])

    def _store(self, k: Tensor, v: Tensor, cache: Tensor, metadata: AttentionMetadata) -> None:
        """Write k and v [tokens, heads, dim] to the planes of the cache; only k where it has one plane."""
        k, v = dense(k), dense(v)
        tokens, heads, dim = k.shape
        options = {"enable_fp_fusion": False} if self._codes else {}
        self._runtime.launch(
            "attention.store",
            (tokens, heads, len(cache)),
            *(k, v, cache[0], cache[-1], metadata.slot_mapping),
            *(*k.stride()[:2], *v.stride()[:2], *cache.stride()[1:4]),
            DIM=dim,
            D=power_of_2(dim),
            BLOCK=cache.shape[3],
            CODES=self._codes,
            **options,
        )

    def _attend(self, q: Tensor, cache: Tensor, metadata: AttentionMetadata, scores: Scores, value_size: int) -> Tensor:
        out = torch.empty((*q.shape[:2], value_size), dtype=q.dtype, device=q.device)
        for part in metadata.once("parts", lambda: _parts(metadata)):
            self._attend_part(part, q, cache, metadata, scores, out)
        return out

    def _attend_part(
        self, part: _Part, q: Tensor, cache: Tensor, metadata: AttentionMetadata, scores: Scores, out: Tensor
    ) -> None:
        (_, heads, dim), value_size = q.shape, out.shape[-1]
        kv_heads, division = cache.shape[2], self._division
        is_decode, element_bytes = part.most_queries == 1, q.element_size()
        tile_bytes = _TILE_BYTES if self._runtime.has_large_shared else _TILE_BYTES // 2
        most = tile_bytes // (power_of_2(dim) * element_bytes)
        group = _shared(heads // kv_heads, most)
        # codes need registers
        prefill_rows = PREFILL_ROWS // (2 if self._codes and self._runtime.shared_bytes < _HOPPER_SHARED else 1)
        programs = heads // group
        most_queries = _VERIFIED if self._runtime.is_invariant else 1
        # too few programs for the GPU, and sequences that are long enough to divide
        is_divided = (
            part.most_queries <= most_queries
            and part.num_tokens * programs < division.programs
            and part.longest(metadata) > division.chunk
        )
        rows = power_of_2(max(ROWS if is_decode or is_divided else min(prefill_rows, most), group))
        tile = max(ROWS, min(division.tile, most) // (2 if self._codes else 1))
        per_program = 1 if is_divided else rows // group
        work = metadata.once(("work", is_decode, per_program), lambda: _work(metadata, part, per_program, q.device))
        num_chunks = -(-part.longest(metadata) // division.chunk) if is_divided else 1
        parts = peaks = out
        if is_divided:
            parts = torch.empty((len(work), heads, num_chunks, value_size), dtype=torch.float32, device=q.device)
            peaks = torch.empty((len(work), heads, num_chunks, 2), dtype=torch.float32, device=q.device)
        slopes, sinks = (out if each is None else each for each in (scores.alibi, scores.sinks))
        window = scores.sliding_window or 0
        is_alone = rows == ROWS and self._runtime.has_large_shared and len(work) * programs * num_chunks <= _FEW
        slot_stride = dim if self._codes else cache.stride(3)
        common: dict[str, Any] = {
            "VALUE": value_size,
            "DV": power_of_2(value_size),
            # a prompt whose bits may differ from those of single tokens has no chunks: their sums need registers
            "CHUNK": division.chunk if is_decode or self._runtime.is_invariant else 0,
            "HAS_WINDOW": window > 0,
            "AHEAD": min(scores.ahead, _MOST_AHEAD),
            "HAS_SINKS": scores.sinks is not None,
        }
        self._runtime.launch(
            "attention.attend",
            (len(work), programs, num_chunks),
            *(q, cache[0], cache[-1], metadata.block_tables, metadata.sequence_lengths, work, slopes, sinks),
            *(out, parts, peaks, *q.stride()[:2], *cache.stride()[1:3], slot_stride, metadata.block_tables.stride(0)),
            *(scores.scale, num_chunks, heads, group, programs // kv_heads, window),
            DIM=dim,
            D=power_of_2(dim),
            M=rows,
            TILE=tile,
            BLOCK=cache.shape[3],
            CAP=scores.soft_cap or 0.0,
            HAS_SLOPES=scores.alibi is not None,
            SPLIT=is_divided,
            TYPE=compute_type(q),
            CODES=self._codes,
            num_warps=8 if rows * power_of_2(dim) * element_bytes >= _TILE_BYTES // 4 else 4,
            **({"num_stages": STAGES_OF_FEW} if is_alone else {}),
            **common,
        )
        if is_divided:
            tensors = parts, peaks, work, metadata.sequence_lengths, sinks, out
            self._runtime.launch("attention.merge", (len(work), heads), *tensors, num_chunks, heads, window, **common)


class RotatingCudaBackend(CudaBackend):
    """`CudaBackend` that is a `RotatingBackend`."""

    def rotate_and_store(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, metadata: AttentionMetadata, rotation: Rotation
    ) -> Tensor:
        if self._codes:  # another kernel makes them, whose products and sums are not fused
            q, k = rotated(self._runtime, q, k, rotation)
            self._store(k, v, cache, metadata)
            return q
        return rotate_into(self._runtime, (q, k, v), (cache[0], cache[1]), metadata.slot_mapping, rotation)


def _shared(group: int, most: int) -> int:
    """Return how many of the `group` query heads that share a head of keys a program computes: all, or the largest
    equal part of at most `most`."""
    return next(group // parts for parts in range(1, group + 1) if group % parts == 0 and group // parts <= most)


def _parts(metadata: AttentionMetadata) -> list[_Part]:
    """Return the rows of single tokens and those of several tokens, which have different tiles."""
    queries = metadata.query_lengths
    singles = [row for row, count in enumerate(queries) if count == 1]
    if not singles or len(singles) == len(queries):
        return [_Part(max(queries), sum(queries))]
    others = [row for row, count in enumerate(queries) if count > 1]
    return [_Part(1, len(singles), singles), _Part(max(queries), sum(queries) - len(singles), others)]


def _work(metadata: AttentionMetadata, part: _Part, per_program: int, device: torch.device) -> Tensor:
    """Return int32 [programs, 4]: row, first token among all of the step, tokens, position of the first one."""
    if part.most_queries == 1 and part.rows is None:
        # on the device: a repeated step has other lengths
        singles, ends = metadata.query_starts[:-1], metadata.sequence_lengths
        return torch.stack((singles, singles, torch.ones_like(singles), ends - 1), dim=1)
    queries, lengths = metadata.query_lengths, metadata.lengths
    starts, rows = [*accumulate(queries, initial=0)], range(len(queries)) if part.rows is None else part.rows
    items = [
        (row, starts[row] + first, min(per_program, queries[row] - first), lengths[row] - queries[row] + first)
        for row in rows
        for first in range(0, queries[row], per_program)
    ]
    return torch.tensor(items, dtype=torch.int32).to(device, non_blocking=True)
