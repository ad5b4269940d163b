"""Attention to chosen blocks: the kernel of paged attention over copies of keys and values.

What a head of keys of a query chose is a sequence of its own. The order of sums is that of the kernel over these keys
(csrc/cpu/attention/attention.h), so a query's result has the same bits in any step, and wherever the copies lie: those
of a few queries side by side, or those of all tokens, of which the queries of a prompt name their blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from octavo.devices.cpu.attention import TILE_KEYS, CpuBackend, token_stride
from octavo.devices.cpu.runtime import FLOAT_TYPES, TYPE_CODES, CpuRuntime, dense, lacks
from octavo.ops import block_sparse
from octavo.ops.block_sparse import BlockChoice, Sequence
from octavo.ops.recurrent import TokenRows
from octavo.ops.registry import Implementation

_ALL_KEYS: Final = 2**31 - 1


class _Copies(NamedTuple):
    """Rows of keys and values [rows * n, kv_heads, dim], and the room for their tiles, where each row begins one."""

    keys: Tensor
    """Empty, as `values` are, once they are in the tiles."""
    values: Tensor
    slots: Tensor
    """int64 [rows * n]"""
    tiles: Tensor
    """uint8 [tiles, bytes]"""
    first: Tensor
    """int32 [rows, 1]: the first tile of each row."""


class BlockSparseAttention:
    """`octavo.ops.block_sparse.block_sparse_attention`; of sizes that the kernels do not take, the reference."""

    def __init__(self, runtime: CpuRuntime) -> None:
        self._cpu, self._empty = runtime.cpu, runtime.empty

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        small: tuple[Tensor, Tensor],
        cache: Tensor,
        metadata: TokenRows,
        by: BlockChoice,
    ) -> Tensor:
        (tokens, heads, dim), kv_heads, dtype = q.shape, k.shape[1], q.dtype
        if CpuBackend.obstacle(dtype, dtype, [dim], TILE_KEYS) is not None:
            return block_sparse.block_sparse_attention(q, k, v, small, cache, metadata, by)
        out = self._empty((tokens, heads, dim), dtype)
        if out.is_meta:
            return out
        q = q.contiguous()
        # where heads choose apart, a token and a head of keys are a row
        q_apart, out_apart = (each.view(tokens, kv_heads, -1, dim) for each in (q, out))
        for sequence in block_sparse.written_sequences(k, v, small[1], cache, metadata):
            dense = min(sequence.length, by.num_chosen * by.width)
            if dense > sequence.start:
                those = sequence.tokens_at(sequence.start, dense)
                copies = self._copied(sequence, torch.arange(dense)[None, None], dtype, is_apart=False)
                tables = torch.arange(len(copies.tiles), dtype=torch.int32)[None]
                self._attend(q[those], out[those], copies, tables, torch.tensor([dense], dtype=torch.int32), by.scale)
            if dense < sequence.length:
                self._attend_chosen(q_apart, out_apart, small[0], sequence, max(sequence.start, dense), by)
        return out

    def _copied(self, sequence: Sequence, positions: Tensor, dtype: torch.dtype, *, is_apart: bool = True) -> _Copies:
        """Copy what lies at positions [queries, kv_heads or 1, n]. is_apart: each head has a row of its own."""
        found = (
            sequence.heads(positions, each, self._empty).to(dtype) for each in (0, 1)
        )  # [queries, kv_heads, n, dim]
        heads, dim, num_keys = sequence.kv_heads, sequence.dim, positions.shape[2]
        rows, of_row = len(positions) * heads if is_apart else len(positions), 1 if is_apart else heads
        keys, values = (
            (each if is_apart else each.transpose(1, 2)).reshape(-1, of_row, dim).contiguous() for each in found
        )
        tiles = -(-num_keys // TILE_KEYS)
        first = torch.arange(0, rows * tiles, tiles, dtype=torch.int32)[:, None]
        slots = (first.long() * TILE_KEYS + torch.arange(num_keys)).flatten()
        block_bytes = self._cpu.attention_block_bytes(of_row, dim, 0, TILE_KEYS, TYPE_CODES[dtype])
        return _Copies(keys, values, slots, self._empty((rows * tiles, block_bytes), torch.uint8), first)

    def _attend(self, q: Tensor, out: Tensor, copies: _Copies, tables: Tensor, lengths: Tensor, scale: float) -> None:
        """Attend q [rows * queries, heads, dim], dense, to the tiles that `tables` int32 [rows, tiles] names, of whose
        keys the last query of a row sees the first `lengths`, int32 [rows]."""
        rows, (num_keys, kv_heads, dim), code = len(tables), copies.keys.shape, TYPE_CODES[q.dtype]
        starts = torch.arange(rows + 1, dtype=torch.int32) * (len(q) // rows)
        self._cpu.attention(
            *(each.data_ptr() for each in (q, copies.keys, copies.values, out, copies.tiles)),
            *(each.data_ptr() for each in (starts, lengths, tables, copies.slots)),
            *(0, 0, q.stride(0), kv_heads * dim, kv_heads * dim, tables.stride(0), copies.tiles.stride(0)),
            *(num_keys, rows, q.shape[1], kv_heads, dim, TILE_KEYS, code, code, scale, _ALL_KEYS, 0.0, 0),
        )

    def _attend_chosen(
        self, q: Tensor, out: Tensor, small: Tensor, sequence: Sequence, start: int, by: BlockChoice
    ) -> None:
        """Attend q [tokens, kv_heads, heads, dim] from position `start` on, where queries choose."""
        end, whole = sequence.length, None
        if _copies_all(start, end, by):
            whole = self._copied(sequence, torch.arange(end)[None, None], q.dtype)
        for first, stop in block_sparse.spans(start, end, by):
            those = sequence.tokens_at(first, stop)
            positions = block_sparse.chosen_keys(small[those], sequence, range(first, stop), by)
            lengths = (positions <= torch.arange(first, stop)[:, None, None]).sum(2, dtype=torch.int32).flatten()
            # keys that a query does not see come last, and are others: what lies there may be NaN
            positions = positions.clamp(max=stop - 1)
            if whole is None:
                copies = self._copied(sequence, positions, q.dtype)
                tables = copies.first + torch.arange(-(-positions.shape[2] // TILE_KEYS), dtype=torch.int32)
            else:
                copies, tables = whole, (whole.first + positions[..., ::TILE_KEYS] // TILE_KEYS).int().flatten(0, 1)
            self._attend(q[those].flatten(0, 1), out[those].flatten(0, 1), copies, tables, lengths, by.scale)
            if whole is not None:
                whole = whole._replace(keys=whole.keys[:0], values=whole.values[:0])


def _copies_all(start: int, end: int, by: BlockChoice) -> bool:
    """Return whether copies of all tokens are fewer than those that the queries at [start, end) would choose, and may
    be used: blocks are of whole tiles, and the copies are bounded."""
    is_less = end < (end - start) * by.num_chosen * by.width
    return is_less and by.width % TILE_KEYS == 0 and end <= block_sparse.MOST_COPIES


def make_attend_chosen_keys(runtime: CpuRuntime) -> Callable[..., Tensor]:
    """Make `octavo.ops.block_sparse.attend_chosen_keys`; of types and sizes that the kernels do not take, the
    reference."""
    kernel, empty = runtime.cpu.chosen_keys_attention, runtime.empty

    def attend_chosen_keys(
        q: Tensor, k: Tensor, v: Tensor, cache: Tensor, metadata: TokenRows, chosen: Tensor, scale: float
    ) -> Tensor:
        (tokens, heads, dim), kv_heads, dtype = q.shape, k.shape[1], q.dtype
        if cache.dtype not in FLOAT_TYPES or CpuBackend.obstacle(dtype, dtype, [dim], TILE_KEYS) is not None:
            return block_sparse.attend_chosen_keys(q, k, v, cache, metadata, chosen, scale)
        out = empty((tokens, heads, dim), dtype)
        if out.is_meta:
            return out
        block_sparse.write(k, v, k.new_empty(len(k), 0), cache, metadata)
        chosen, tables, width = dense(chosen), metadata.block_tables, cache.element_size()
        kernel(
            *(q.data_ptr(), out.data_ptr(), metadata.query_starts.data_ptr(), metadata.sequence_lengths.data_ptr()),
            *(cache.data_ptr(), tables.data_ptr(), chosen.data_ptr(), token_stride(q), tables.stride(0)),
            *(cache.stride(0) * width, cache.shape[1] // metadata.block_size * width, chosen.shape[1]),
            *(metadata.block_size, tokens, len(tables), heads, kv_heads, dim),
            *(TYPE_CODES[dtype], TYPE_CODES[cache.dtype], scale),
        )
        return out

    return attend_chosen_keys


IMPLEMENTATIONS = (
    Implementation("block_sparse_attention", "native", BlockSparseAttention),
    Implementation("attend_chosen_keys", "native", make_attend_chosen_keys, lacks("chosen_keys_attention")),
)
