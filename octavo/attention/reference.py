"""Paged attention in plain PyTorch: correct for every mixture of rows, on every device.

Rows that compute one token (decode) are attended together, padded to the longest; rows that compute more go one by one.
What a layer allocates is bounded: decode rows are cut into groups, long rows that need a mask into pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.attention.metadata import AttentionMetadata
from octavo.core.arithmetic import ceil_div

_GATHERED_TOKENS = 16_384
"""Most tokens, padding included, whose keys and values one decode group gathers; a single row may exceed it."""
_KEY_TILE = 32
"""Decode rows see a multiple of this many keys. The attention function sums in vectors of up to 16: with whole vectors
only, a row's answer has the same bits however long its neighbours are, and alone."""
_MASK_ELEMENTS = 1 << 22
"""Most queries x keys of one row attended at once where a mask is needed; also the most kept for the other layers."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Queries attended together: decode rows, one query each, or consecutive queries of one row."""

    tokens: Tensor | slice | None
    """Where the queries lie among the step's tokens; None for all of them in order."""
    slots: Tensor | None
    """int64 [rows, keys]: cache slot of every key; None when the step's own keys are all the row has."""
    mask: Callable[[], Tensor] | None
    """What is added to the scores, [rows, 1, 1, keys] or [queries, keys]: 0 or -inf. None where nothing is hidden, or
    only the future in a row without context."""
    distance: Callable[[], Tensor]
    """Key position minus query position, in the shape of the mask."""
    is_decode: bool = False
    """One query a row, also where there is one row: alone and in a batch the same kernel runs."""


class ReferenceBackend:
    """`AttentionBackend` on gathers and `scaled_dot_product_attention`, with float32 softmax."""

    name = "reference"

    def cache_shape(self, num_blocks: int, block_size: int, kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """[2, num_blocks, kv_heads, block_size, head_dim]: keys, then values."""
        return 2, num_blocks, kv_heads, block_size, head_dim

    def workspace_bytes(
        self, max_tokens: int, max_length: int, num_heads: int, kv_heads: int, head_dim: int, element_size: int
    ) -> int:
        """Gathered keys and values with their indices, a mask, what is written, and copies of queries and answers."""
        row_bytes = 2 * kv_heads * (head_dim * element_size + 8)
        gathered = max(_GATHERED_TOKENS, max_length) * (row_bytes + 3 * 2 * kv_heads * 8)
        # a mask's distances, flags and numbers, its copy inside the attention function, and the kept ones
        masks = min(_MASK_ELEMENTS, max_tokens * max_length) * (4 + 3 + 3 * 4)
        return gathered + masks + max_tokens * (row_bytes + 4 * num_heads * head_dim * element_size)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        alibi: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionBackend.run`."""
        layout = cache.shape
        flat = cache.view(-1, layout[-1])
        written = metadata.once(("written", layout), lambda: _cache_rows(metadata.slot_mapping, layout).view(-1))
        flat.index_copy_(0, written, torch.stack((k, v)).permute(0, 2, 1, 3).reshape(-1, layout[-1]))

        pieces = metadata.once(
            ("pieces", sliding_window, alibi is not None),
            lambda: list(_pieces(metadata, sliding_window, alibi is not None, q.dtype, q.device)),
        )
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if len(pieces) > 1 else q
        for index, piece in enumerate(pieces):
            queries = q if piece.tokens is None else q[piece.tokens]
            if piece.slots is None:
                # [1, kv_heads, queries, dim]: the keys of this step, where they are
                keys, values = (each[piece.tokens or slice(None)].transpose(0, 1)[None] for each in (k, v))
            else:
                # eight bytes for every head of every key: kept for the other layers only where pieces are few
                make = partial(_cache_rows, piece.slots, layout)
                rows = metadata.once(("rows", index, layout, sliding_window), make) if len(pieces) < 4 else make()
                # [2, kv_heads, rows, keys] cache rows give [2, kv_heads, rows, keys, dim]
                keys, values = F.embedding(rows, flat).transpose(1, 2)
            answer = _attend(queries, keys, values, piece, scale, soft_cap, alibi)
            if piece.tokens is None:
                return answer
            out[piece.tokens] = answer
            # or they would live beside those of the next piece
            del keys, values
        return out


def _cache_rows(slots: Tensor, layout: torch.Size) -> Tensor:
    """int64 [2, kv_heads, *slots.shape]: where in the cache, seen as [rows, dim], keys and values of `slots` lie."""
    _, num_blocks, kv_heads, block_size, _ = layout
    rows = slots // block_size * (kv_heads * block_size) + slots % block_size
    planes = torch.arange(2, device=slots.device)[:, None] * (num_blocks * kv_heads * block_size)
    heads = torch.arange(kv_heads, device=slots.device) * block_size
    return (planes + heads).view(2, kv_heads, *(1,) * slots.dim()) + rows


def _pieces(
    metadata: AttentionMetadata, window: int | None, with_distance: bool, dtype: torch.dtype, device: torch.device
) -> Iterator[_Piece]:
    """Cut the step into pieces that together cover every token once."""
    starts = list(accumulate(metadata.query_lengths, initial=0))
    decoding = [row for row, queries in enumerate(metadata.query_lengths) if queries == 1]
    for rows in _decode_groups(decoding, metadata.lengths, window):
        yield _decode_piece(metadata, rows, starts, window, dtype, device)
    kept = 0
    for row, queries in enumerate(metadata.query_lengths):
        if queries == 1:
            continue
        context = metadata.lengths[row] - queries
        whole = queries == starts[-1]
        if context == 0 and (window is None or window >= queries):
            here = None if whole else slice(starts[row], starts[row + 1])
            yield _Piece(here, None, None, partial(_distance, 0, 0, queries, device))
            continue
        step = max(1, _MASK_ELEMENTS // metadata.lengths[row])
        for start in range(0, queries, step):
            stop = min(start + step, queries)
            here = None if whole and stop - start == queries else slice(starts[row] + start, starts[row] + stop)
            first_key = 0 if window is None else max(0, context + start + 1 - window)
            keys = torch.arange(first_key, context + stop, device=device)
            slots = _slots(metadata.block_tables[row : row + 1], keys[None], metadata.block_size)
            distance = partial(_distance, first_key, context + start, context + stop, device)
            mask: Callable[[], Tensor] = partial(_row_mask, distance, window, dtype)
            kept += (stop - start) * len(keys)
            yield _Piece(here, slots, mask if kept > _MASK_ELEMENTS else _constant(mask()), distance)


def _decode_piece(
    metadata: AttentionMetadata,
    rows: list[int],
    starts: list[int],
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> _Piece:
    """Rows with one query each, padded to the one that sees the most keys."""
    tokens = None if len(rows) == starts[-1] else torch.tensor([starts[row] for row in rows], device=device)
    tables = metadata.block_tables if tokens is None else metadata.block_tables[rows]
    seen = [_visible(metadata.lengths[row], window) for row in rows]
    ends = torch.tensor([[metadata.lengths[row]] for row in rows], device=device)
    first = torch.zeros_like(ends) if window is None else torch.clamp(ends - window, min=0)
    positions = first + torch.arange(ceil_div(max(seen), _KEY_TILE) * _KEY_TILE, device=device)
    slots = _slots(tables, torch.minimum(positions, ends - 1), metadata.block_size)
    distance = (positions - ends + 1)[:, None, None]
    mask = _constant(_mask(distance > 0, dtype))
    return _Piece(tokens, slots, mask, _constant(distance), is_decode=True)


def _decode_groups(rows: list[int], lengths: Sequence[int], window: int | None) -> Iterator[list[int]]:
    """Cut decode rows so that no group gathers more than `_GATHERED_TOKENS`; one group keeps the batch's order."""
    if not rows:
        return
    if len(rows) * max(_visible(lengths[row], window) for row in rows) <= _GATHERED_TOKENS:
        yield rows
        return
    # neighbours of similar length waste the least padding
    group: list[int] = []
    for row in sorted(rows, key=lambda row: lengths[row]):
        if group and (len(group) + 1) * _visible(lengths[row], window) > _GATHERED_TOKENS:
            yield group
            group = []
        group.append(row)
    yield group


def _visible(length: int, window: int | None) -> int:
    """How many keys the last token of a sequence sees."""
    return length if window is None else min(length, window)


def _slots(tables: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """int64 [rows, keys]: cache slots of `positions` [rows, keys] by the block tables [rows, blocks]."""
    return tables.long().gather(1, positions // block_size) * block_size + positions % block_size


def _distance(first_key: int, first_query: int, end: int, device: torch.device) -> Tensor:
    """int32 [queries, keys]: key position minus query position, of keys and queries up to `end`."""
    keys = torch.arange(first_key, end, dtype=torch.int32, device=device)
    return keys - torch.arange(first_query, end, dtype=torch.int32, device=device)[:, None]


def _row_mask(distance: Callable[[], Tensor], window: int | None, dtype: torch.dtype) -> Tensor:
    """Hides the future and what lies before the window."""
    difference = distance()
    hidden = difference > 0
    if window is not None:
        hidden |= difference <= -window
    return _mask(hidden, dtype)


def _constant(tensor: Tensor) -> Callable[[], Tensor]:
    """A function that answers `tensor`."""
    return lambda: tensor


def _mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a key is seen, -inf where it is hidden."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


def _attend(
    q: Tensor, k: Tensor, v: Tensor, piece: _Piece, scale: float, soft_cap: float | None, alibi: Tensor | None
) -> Tensor:
    """Attend q [rows or queries, heads, dim] to k, v [rows, kv_heads, keys, dim]; the answer has q's shape.

    Query heads that share a key head are laid out so that keys are never repeated: as queries of one token (decode),
    as heads with a stride of zero (one row).
    """
    tokens, heads, dim = q.shape
    rows, kv_heads, num_keys, _ = k.shape
    shared = heads // kv_heads
    one_row = rows == 1 and not piece.is_decode
    mask = None if piece.mask is None else piece.mask()
    if one_row:
        q = q.view(tokens, kv_heads, shared, dim).permute(1, 2, 0, 3)
        k, v = (each.transpose(0, 1).expand(kv_heads, shared, num_keys, dim) for each in (k, v))
    else:
        q = q.view(tokens, kv_heads, shared, dim)
    if soft_cap is None and alibi is None:
        causal = piece.slots is None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
    else:
        scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * scale
        if soft_cap is not None:
            scores = torch.tanh(scores / soft_cap) * soft_cap
        if alibi is not None:
            slopes = alibi.view(kv_heads, shared, 1, 1) if one_row else alibi.view(1, kv_heads, shared, 1)
            scores += slopes * piece.distance()
        if mask is not None:
            scores += mask
        elif piece.slots is None:
            scores += _mask(torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1), scores.dtype)
        out = torch.matmul(torch.softmax(scores, dim=-1), v.float()).to(q.dtype)
    return out.permute(2, 0, 1, 3).reshape(tokens, heads, dim) if one_row else out.view(tokens, heads, dim)
