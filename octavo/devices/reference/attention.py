"""Paged attention in plain PyTorch: correct for every mixture of rows, on every device.

Rows that compute one token (decode) are attended together where they see equally many keys; rows that compute more go
one by one, in pieces. How many keys a query is attended to with depends on its position alone, and queries come in
fours: so on a CPU a token's result has the same bits in a whole prefill, in any piece of it, in a decode step, alone
and in any batch. What a layer allocates is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.attention.backend import Parts, Scores, StepSizes
from octavo.attention.cache_format import dequantize, is_quantized, quantize
from octavo.attention.metadata import AttentionMetadata

_SCALE_BYTES = 4
_GATHERED_TOKENS = 16_384
"""Most tokens, padding included, whose keys and values one decode group gathers; a single row may exceed it."""
_KEY_TILE = 32
"""Queries see a multiple of this many keys, the hidden ones included: whole vectors of every instruction set."""
_MASK_ELEMENTS = 1 << 22
"""Most queries x keys of one row attended at once where a mask is needed; also the most kept for the other layers."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Queries attended together: decode rows, one query each, or consecutive queries of one row."""

    tokens: Tensor | slice | None
    """Where the queries lie among the step's tokens; None for all of them in order."""
    slots: Tensor
    """int64 [rows, keys]: cache slot of every key."""
    mask: Callable[[], Tensor]
    """What is added to the scores, [rows, 1, 1, keys] or [queries, keys]: 0, or -inf where a key is hidden."""
    distance: Callable[[], Tensor]
    """Key position minus query position, in the shape of the mask."""
    is_decode: bool = False
    """One query a row, also where there is one row: alone and in a batch the same kernel runs."""


class ReferenceBackend:
    """`AttentionBackend` on gathers and `scaled_dot_product_attention`, with float32 softmax."""

    name = "reference"

    def __init__(self, cache_dtype: torch.dtype = torch.float32) -> None:
        self._quantized = cache_dtype if is_quantized(cache_dtype) else None
        self.element_type = cache_dtype if self._quantized is None else torch.uint8

    def cache_shape(
        self, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, value_size: int = 0
    ) -> tuple[int, ...]:
        """Return [2, num_blocks, kv_heads, block_size, head_dim]: keys, values; quantised ones end in their scale.

        Latents have one plane.
        """
        return (
            1 if value_size else 2,
            num_blocks,
            kv_heads,
            block_size,
            head_dim + (0 if self._quantized is None else _SCALE_BYTES),
        )

    def workspace_bytes(self, sizes: StepSizes) -> int:
        """Return the bytes of gathered keys and values, indices, a mask, writes, and copies of queries and results."""
        # quantised rows are gathered as bytes, split into codes and scales, and widened by way of float32
        widened = 0 if self._quantized is None else 2 * sizes.head_dim + 8 + 4 * sizes.head_dim
        row_bytes = 2 * sizes.kv_heads * (sizes.head_dim * sizes.element_size + 8 + widened)
        longest = _key_range(sizes.max_length, None)[1]
        gathered = max(_GATHERED_TOKENS, longest) * (row_bytes + 3 * 2 * sizes.kv_heads * 8)
        # a mask's distances, flags and numbers, its copy inside the attention function, and the kept ones
        masks = min(_MASK_ELEMENTS, sizes.max_tokens * longest) * (4 + 3 + 3 * 4)
        copies = 4 * sizes.num_heads * sizes.head_dim * sizes.element_size
        return gathered + masks + sizes.max_tokens * (row_bytes + copies)

    def gathered_bytes(self, sizes: StepSizes, num_keys: int) -> int:
        """Return 0: torch computes attention to gathered keys."""
        return 0

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, metadata: AttentionMetadata, scores: Scores
    ) -> Tensor:
        return self._run(q, torch.stack((k, v)), cache, metadata, scores)

    def run_latents(self, q: Parts, latents: Parts, cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
        new = torch.cat(latents, dim=-1)[None, :, None]
        # the rest is attended to as well, and cut off
        found = self._run(torch.cat(q, dim=-1), new, cache, metadata, Scores(scale))
        return found[..., : q[0].shape[-1]].contiguous()

    def _run(self, q: Tensor, new: Tensor, cache: Tensor, metadata: AttentionMetadata, scores: Scores) -> Tensor:
        """Attend with `new` [planes, tokens, kv_heads, dim], planes of keys and of values or one of both."""
        dim, layout = cache.shape[-1], _Layout.of(cache)
        flat = cache.as_strided((layout.num_rows, dim), (dim, 1))
        if new.shape[1]:
            written = metadata.once(("written", layout), lambda: _cache_rows(metadata.slot_mapping, layout).view(-1))
            stored = self._stored(new.transpose(1, 2), cache.dtype)  # [planes, kv_heads, tokens, dim]
            flat.index_copy_(0, written, stored.reshape(-1, dim))

        window, has_alibi = scores.sliding_window, scores.alibi is not None
        make_pieces = partial(_pieces, metadata, window, has_alibi, q.dtype, q.device)
        if scores.ahead:
            make_pieces = partial(_pieces_both_ways, metadata, window, scores.ahead, q.dtype, q.device)
        pieces = metadata.once(("pieces", window, has_alibi, scores.ahead), lambda: list(make_pieces()))
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if len(pieces) > 1 else q
        for index, piece in enumerate(pieces):
            queries = q if piece.tokens is None else q[piece.tokens]
            # eight bytes for every head of every key: kept for the other layers only where pieces are few
            make = partial(_cache_rows, piece.slots, layout)
            rows = metadata.once(("rows", index, layout, window), make) if len(pieces) < 4 else make()
            # [planes, kv_heads, rows, keys] cache rows give [planes, kv_heads, rows, keys, dim]
            gathered = self._restored(F.embedding(rows, flat), q.dtype).transpose(1, 2)
            result = _attend(queries, gathered[0], gathered[-1], piece, scores)
            if piece.tokens is None:
                return result
            out[piece.tokens] = result
            # or they would live beside those of the next piece
            del gathered
        return out

    def _stored(self, x: Tensor, element_type: torch.dtype) -> Tensor:
        """Return keys or values [..., dim] as rows of the cache."""
        if self._quantized is None:
            return x.to(element_type)
        codes, scales = quantize(x, self._quantized)
        return torch.cat((codes.view(torch.uint8), scales.view(torch.uint8)), dim=-1)

    def _restored(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows of the cache as keys or values [..., dim] of `dtype`."""
        if self._quantized is None:
            return rows.to(dtype)
        codes, scales = rows[..., :-_SCALE_BYTES].contiguous(), rows[..., -_SCALE_BYTES:].contiguous()
        return dequantize(codes.view(self._quantized), scales.view(torch.float32), dtype)


class _Layout(NamedTuple):
    """How a layer's cache lies in memory, in rows of one head of one token."""

    planes: int
    kv_heads: int
    block_size: int
    plane_stride: int
    block_stride: int
    num_rows: int
    """From its first row to its last; those of other layers may lie between."""

    @classmethod
    def of(cls, cache: Tensor) -> _Layout:
        planes, num_blocks, kv_heads, block_size, dim = cache.shape
        plane, block = cache.stride(0) // dim, cache.stride(1) // dim
        last = (planes - 1) * plane
        return cls(planes, kv_heads, block_size, plane, block, last + (num_blocks - 1) * block + kv_heads * block_size)


def _cache_rows(slots: Tensor, layout: _Layout) -> Tensor:
    """Return int64 [planes, kv_heads, *slots.shape]: rows of keys and values of `slots` in the cache [rows, dim]."""
    size = layout.block_size
    rows = slots // size * layout.block_stride + slots % size
    planes = torch.arange(layout.planes, device=slots.device)[:, None] * layout.plane_stride
    heads = torch.arange(layout.kv_heads, device=slots.device) * size
    return (planes + heads).view(layout.planes, layout.kv_heads, *(1,) * slots.dim()) + rows


def _pieces(
    metadata: AttentionMetadata, window: int | None, with_distance: bool, dtype: torch.dtype, device: torch.device
) -> Iterator[_Piece]:
    """Cut the step into pieces that together cover every token once."""
    starts = list(accumulate(metadata.query_lengths, initial=0))
    decoding = [row for row, queries in enumerate(metadata.query_lengths) if queries == 1]
    for rows, span in _decode_groups(decoding, metadata.lengths, window):
        yield _decode_piece(metadata, rows, span, starts, window, dtype, device)
    kept = 0
    for row, queries in enumerate(metadata.query_lengths):
        if queries == 1:
            continue
        length = metadata.lengths[row]
        context = length - queries
        for start, stop, first_key, end_key in _spans(context, length, window):
            whole = stop - start == starts[-1]
            here = None if whole else slice(starts[row] + start - context, starts[row] + stop - context)
            keys = torch.arange(first_key, end_key, device=device).clamp_(_first_seen(start, window), length - 1)
            slots = _slots(metadata.block_tables[row : row + 1], keys[None], metadata.block_size)
            distance = partial(_distance, first_key, end_key, start, stop, device)
            mask: Callable[[], Tensor] = partial(_row_mask, distance, window, dtype)
            kept += (stop - start) * len(keys)
            yield _Piece(here, slots, mask if kept > _MASK_ELEMENTS else _constant(mask()), distance)


def _pieces_both_ways(
    metadata: AttentionMetadata, window: int | None, ahead: int, dtype: torch.dtype, device: torch.device
) -> Iterator[_Piece]:
    """Cut the step into pieces whose queries see up to `ahead` keys behind themselves, too."""
    first_query, num_queries = 0, sum(metadata.query_lengths)
    for row, (length, queries) in enumerate(zip(metadata.lengths, metadata.query_lengths, strict=True)):
        context, end_key = length - queries, _key_range(length, None)[1]
        shift = first_query - context
        for start, stop, first_key, _ in _spans(context, length, window):
            keys = torch.arange(first_key, end_key, device=device)
            seen = keys.clamp(_first_seen(start, window), length - 1)
            slots = _slots(metadata.block_tables[row : row + 1], seen[None], metadata.block_size)
            distance = _distance(first_key, end_key, start, stop, device)
            hidden = (distance > ahead) | (keys >= length)
            if window is not None:
                hidden |= distance <= -window
            here = None if stop - start == num_queries else slice(start + shift, stop + shift)
            yield _Piece(here, slots, _constant(_mask(hidden, dtype)), _constant(distance))
        first_query += queries


def _decode_piece(
    metadata: AttentionMetadata,
    rows: list[int],
    num_keys: int,
    starts: list[int],
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> _Piece:
    """Attend with one query per row; they see `num_keys` keys, the hidden ones included."""
    tokens = None if len(rows) == starts[-1] else torch.tensor([starts[row] for row in rows], device=device)
    tables = metadata.block_tables if tokens is None else metadata.block_tables[rows]
    ends = torch.tensor([[metadata.lengths[row]] for row in rows], device=device)
    first = torch.tensor([[_key_range(metadata.lengths[row], window)[0]] for row in rows], device=device)
    positions = first + torch.arange(num_keys, device=device)
    seen = torch.tensor([[_first_seen(metadata.lengths[row] - 1, window)] for row in rows], device=device)
    slots = _slots(tables, positions.clamp(seen, ends - 1), metadata.block_size)
    distance = (positions - ends + 1)[:, None, None]
    hidden = distance > 0
    if window is not None:
        hidden |= distance <= -window
    return _Piece(tokens, slots, _constant(_mask(hidden, dtype)), _constant(distance), is_decode=True)


def _decode_groups(rows: list[int], lengths: Sequence[int], window: int | None) -> Iterator[tuple[list[int], int]]:
    """Decode rows that see equally many keys, and how many; no group gathers more than `_GATHERED_TOKENS`."""
    by_size: dict[int, list[int]] = {}
    for row in rows:
        first, end = _key_range(lengths[row], window)
        by_size.setdefault(end - first, []).append(row)
    for num_keys, group in by_size.items():
        step = max(1, _GATHERED_TOKENS // num_keys)
        for start in range(0, len(group), step):
            yield group[start : start + step], num_keys


def _key_range(length: int, window: int | None) -> tuple[int, int]:
    """Return the keys that the query at position `length - 1` is attended to with, hidden ones included: [first, end).

    A function of its position alone, so that the same sums are made in the same order whatever else a step computes:
    bounds lie on a grid of whole vectors, which grows with the length so that neighbours share their range.
    """
    if window is None or length <= window:
        grid = max(_KEY_TILE, 1 << max(0, (length - 1).bit_length() - 4))
        return 0, -(-length // grid) * grid
    grid = max(_KEY_TILE, 1 << max(0, window.bit_length() - 4))
    return (length - window) // grid * grid, -(-length // grid) * grid


def _first_seen(position: int, window: int | None) -> int:
    """Return the first key that the query at `position` sees. Earlier ones are not read: their block may be gone, and
    NaN there would not be hidden by a weight of zero."""
    return 0 if window is None else max(0, position - window + 1)


def _spans(start: int, end: int, window: int | None) -> Iterator[tuple[int, int, int, int]]:
    """Cut the queries at positions [start, end) into (start, stop, first key, end key) with one key range each."""
    while start < end:
        first_key, end_key = _key_range(start + 1, window)
        limit = min(end, end_key, start + max(1, _MASK_ELEMENTS // (end_key - first_key)))
        stop = start + 1
        while stop < limit and _key_range(stop + 1, window) == (first_key, end_key):
            stop += 1
        yield start, stop, first_key, end_key
        start = stop


def _slots(tables: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Return int64 [rows, keys]: cache slots of `positions` [rows, keys] by the block tables [rows, blocks]."""
    return tables.long().gather(1, positions // block_size) * block_size + positions % block_size


def _distance(first_key: int, end_key: int, first_query: int, end_query: int, device: torch.device) -> Tensor:
    """Return int32 [queries, keys]: key position minus query position."""
    keys = torch.arange(first_key, end_key, dtype=torch.int32, device=device)
    return keys - torch.arange(first_query, end_query, dtype=torch.int32, device=device)[:, None]


def _row_mask(distance: Callable[[], Tensor], window: int | None, dtype: torch.dtype) -> Tensor:
    """Hide the future and what lies before the window."""
    difference = distance()
    hidden = difference > 0
    if window is not None:
        hidden |= difference <= -window
    return _mask(hidden, dtype)


def _constant(tensor: Tensor) -> Callable[[], Tensor]:
    """Return a function that returns `tensor`."""
    return lambda: tensor


def _mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where a key is seen, -inf where it is hidden."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


def _attend(q: Tensor, k: Tensor, v: Tensor, piece: _Piece, scores: Scores) -> Tensor:
    """Attend q [rows or queries, heads, dim] to k, v [rows, kv_heads, keys, dim]; the result has q's shape.

    Query heads that share a key head are laid out so that keys are never repeated: as queries of one token (decode),
    as heads with a stride of zero (one row). Queries are padded to a multiple of four: with fewer, matrix products sum
    in another order.
    """
    tokens, heads, dim = q.shape
    kv_heads, num_keys = k.shape[1:3]
    shared = heads // kv_heads
    if piece.is_decode:
        q = q.view(tokens, kv_heads, shared, dim)
    else:
        q = q.view(tokens, kv_heads, shared, dim).permute(1, 2, 0, 3)
        k, v = (each.transpose(0, 1).expand(kv_heads, shared, num_keys, dim) for each in (k, v))
    num_queries = q.shape[2]
    extra = -num_queries % 4

    def padded(x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, extra)) if extra and x.dim() > 1 and x.shape[-2] > 1 else x

    q, mask = F.pad(q, (0, 0, 0, extra)) if extra else q, padded(piece.mask())
    if scores.soft_cap is None and scores.alibi is None and scores.sinks is None:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scores.scale)
    else:
        by_head = (1, kv_heads, shared, 1) if piece.is_decode else (kv_heads, shared, 1, 1)
        alibi, sinks = (None if each is None else padded(each.view(by_head)) for each in (scores.alibi, scores.sinks))
        slopes = None if alibi is None else alibi * padded(piece.distance())
        out = _attend_bent(q, k, v, mask, scores._replace(alibi=slopes, sinks=sinks))
    out = out[:, :, :num_queries]
    return (out if piece.is_decode else out.permute(2, 0, 1, 3)).reshape(tokens, heads, dim)


def _attend_bent(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scores: Scores) -> Tensor:
    """Attend q [.., queries, dim] to k, v [.., keys, dim]. Slopes are multiplied by distances, sinks end in 1."""
    scored = torch.matmul(q.float(), k.float().transpose(-1, -2)) * scores.scale
    if scores.soft_cap is not None:
        scored = torch.tanh(scored / scores.soft_cap) * scores.soft_cap
    if scores.alibi is not None:
        scored += scores.alibi
    scored += mask
    if scores.sinks is not None:
        scored = torch.cat((scored, scores.sinks.expand(*scored.shape[:-1], 1)), dim=-1)
    weights = torch.softmax(scored, dim=-1)[..., : k.shape[-2]]
    return torch.matmul(weights, v.float()).to(q.dtype)
