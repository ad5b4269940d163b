"""Attention to the last tokens and to compressed ones: every `rate` tokens leave one vector, key and value at once.

Each token adds what vectors are made of (a part and a gate for each element) to a cache; the token that ends a window
of `rate` tokens makes the vector of the window, the sum of its parts weighed by a softmax of their gates over the
window. Where windows overlap, the first half of each token's parts goes into the vector of the next window, the second
half into that of its own. A query attends to the `window` last tokens, itself included, and to the vectors of windows
that have ended: to all of them, or to the `num_chosen` that score best by small keys stored behind each vector.

What a token adds to a sum depends on its position alone, never on what else is computed.

Source: DeepSeek-V4's release.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.recurrent import TokenRows
from octavo.ops.registry import Operator
from octavo.ops.stored_rows import StoredSequence, example_rows, stored_rows, stored_sequences

_TILE: Final = 32
"""Queries see a multiple of this many vectors, the hidden ones included."""
_GATHERED: Final = 1 << 14
"""Most vectors that are gathered at once; those of one query may be more."""
_SCORED_QUERIES: Final = 256
"""Queries that choose with the keys that were gathered once."""


class Ends(NamedTuple):
    """The tokens of a step that end windows, row by row: int64 [windows] each."""

    rows: Tensor
    positions: Tensor


class Sight(NamedTuple):
    """What a query attends to. scale: the factor of scores. window: how many of the last tokens, itself included. rate:
    tokens for each compressed vector, 0 where there are none. num_chosen: how many of these, None for all."""

    scale: float
    window: int
    rate: int = 0
    num_chosen: int | None = None


class SmallQueries(NamedTuple):
    """The queries that choose compressed vectors, [tokens, heads, size], and the weight of each, float32 [tokens,
    heads]."""

    queries: Tensor
    weights: Tensor


def ends_of(metadata: TokenRows, rate: int) -> Ends:
    """Return the tokens of a step that end windows."""
    rows: list[int] = []
    positions: list[int] = []
    for row, (length, count) in enumerate(zip(metadata.lengths, metadata.query_lengths, strict=True)):
        first = length - count
        own = range(first + -(first + 1) % rate, length, rate)
        positions += own
        rows += [row] * len(own)
    device = metadata.block_tables.device
    return Ends(*(torch.tensor(each, dtype=torch.int64).to(device) for each in (rows, positions)))


def store_vectors(values: Tensor, cache: Tensor, metadata: TokenRows, stride: int, ends: Ends | None = None) -> None:
    """Write values [vectors, size] into a cache [blocks, values]: of each token of a step, or of those in `ends`."""
    if values.is_meta:
        return
    size, store = metadata.block_size, cache.view(len(cache), -1, values.shape[1])
    if ends is None:
        blocks, positions = metadata.slot_mapping // size, metadata.slot_mapping
    else:
        blocks, positions = metadata.block_tables[ends.rows, ends.positions // size].long(), ends.positions
    store[blocks, positions % size // stride] = values.to(store.dtype)


def compressed_windows(
    cache: Tensor, metadata: TokenRows, ends: Ends, biases: Sequence[Tensor], dtype: torch.dtype, is_overlapping: bool
) -> list[Tensor]:
    """Return the vectors of the windows that `ends` end, [windows, dim] of `dtype` for each of several kinds.

    `cache` [blocks, values] has for each kind the parts of a token and behind them its gates, as wide as the kind's
    bias [rate, width], which is added to the gates of the tokens of a window. Where windows overlap, dim is half of it.
    """
    rate, count = len(biases[0]), len(ends.positions)
    widths = [bias.shape[1] for bias in biases]
    dims = [width // 2 if is_overlapping else width for width in widths]
    if cache.is_meta or not count:
        return [cache.new_empty((count, dim), dtype=dtype) for dim in dims]
    span = rate * (2 if is_overlapping else 1)
    positions = ends.positions[:, None] - torch.arange(span - 1, -1, -1, device=cache.device)
    seen = positions.clamp(min=0)
    blocks = metadata.block_tables[ends.rows[:, None], seen // metadata.block_size].long()
    store, places = cache.view(len(cache), -1, 2 * sum(widths)), seen % metadata.block_size
    parts = stored_rows(store, blocks, places, 0, store.shape[2]).float()  # [windows, tokens, values]
    found, start = [], 0
    for bias, width, dim in zip(biases, widths, dims, strict=True):
        values, gates = parts[..., start : start + width], parts[..., start + width : start + 2 * width]
        gates = gates + bias.float().repeat(span // rate, 1)
        if is_overlapping:
            halves = torch.arange(span, device=cache.device)[:, None] >= rate
            values, gates = (torch.where(halves, each[..., dim:], each[..., :dim]) for each in (values, gates))
        gates = gates.masked_fill((positions < 0)[..., None], float("-inf"))
        found.append(_weighed(values, gates).to(dtype))
        start += 2 * width
    return found


def compressed_attention(
    q: Tensor,
    caches: Sequence[Tensor],
    metadata: Sequence[TokenRows],
    by: Sight,
    sinks: Tensor,
    small: SmallQueries | None = None,
) -> Tensor:
    """Attend q [tokens, heads, dim] to what its sequence has in the caches, which already hold this step's vectors.

    caches, metadata: of the tokens, and of the compressed vectors where there are any, each [blocks, values]; small
    keys stand behind the `dim` elements of a vector. sinks: float32 [heads], one more score of every query, which takes
    part in the softmax and has no value. Returns [tokens, heads, dim].
    """
    out = torch.empty_like(q)
    if q.is_meta:
        return out
    for recent, *others in zip(*map(stored_sequences, caches, metadata, (1, by.rate)), strict=True):
        for start, stop in _spans(recent.start, recent.length, by):
            tokens = recent.tokens_at(start, stop)
            own = None if small is None else SmallQueries(*(each[tokens] for each in small))
            positions = torch.arange(start, stop, device=q.device)
            keys, mask = _seen(positions, recent, others, by, own, _num_padded(start, by))
            out[tokens] = _attend(q[tokens], keys, mask, sinks, by.scale)
    return out


def choose_pools(
    small: SmallQueries, cache: Tensor, metadata: TokenRows, rate: int, num_chosen: int, num_tokens: int
) -> Tensor:
    """Return which tokens every query attends to: those of the windows that it chooses, and those behind the last one.

    `cache` [blocks, values] has the small key of each window of `rate` tokens, which already holds this step's; a query
    chooses the `num_chosen` that score best. The result, int32 [tokens, num_tokens], has positions in ascending order,
    and behind them -1.
    """
    queries = small.queries
    chosen = torch.full((len(queries), num_tokens), -1, dtype=torch.int32, device=queries.device)
    if queries.is_meta:
        return chosen
    for keys in stored_sequences(cache, metadata, rate):
        tokens = torch.arange(keys.length, dtype=torch.int32, device=queries.device)
        for start in range(keys.start, keys.length, _SCORED_QUERIES):
            positions = torch.arange(start, min(start + _SCORED_QUERIES, keys.length), device=queries.device)
            own, numbers = keys.tokens_at(start, start + len(positions)), None
            if (int(positions[-1]) + 1) // rate > num_chosen:
                given = SmallQueries(*(each[own] for each in small))
                numbers = _chosen(positions, keys, 0, num_chosen, given, num_chosen)
            for query, position in enumerate(range(start, start + len(positions))):
                seen, ended = tokens[: position + 1], (position + 1) // rate
                if numbers is not None and ended > num_chosen:
                    best = seen[: ended * rate].view(-1, rate)[numbers[query]].flatten()
                    seen = torch.cat((best, seen[ended * rate :]))
                chosen[own.start + query, : len(seen)] = seen
    return chosen


def workspace_bytes(size: int, num_seen: int, num_tokens: int, num_heads: int) -> int:
    """Return the most bytes that the references allocate beside their outputs.

    num_seen: vectors of `size` elements that a query sees or chooses from.
    """
    gathered = max(_GATHERED, num_seen + _TILE)
    return gathered * (size * (2 + 2 * 4) + num_heads * 3 * 4) + num_tokens * size * 3 * 4


def _vectors(sequence: StoredSequence, positions: Tensor) -> Tensor:
    """Return the whole vectors at the positions of tokens, int64 of any shape: [*, size]."""
    return sequence.rows(positions, 0, sequence.store.shape[2])


def _weighed(values: Tensor, gates: Tensor) -> Tensor:
    """Return the sum of values [windows, tokens, dim] by the softmax of gates over tokens, token after token."""
    weights = torch.exp(gates - gates.amax(1, keepdim=True))
    total, norm = values[:, 0] * weights[:, 0], weights[:, 0]
    for token in range(1, values.shape[1]):
        total, norm = total + values[:, token] * weights[:, token], norm + weights[:, token]
    return total / norm


def _num_padded(position: int, by: Sight) -> int:
    """Return how many compressed vectors a query sees, hidden ones included."""
    if not by.rate:
        return 0
    ended = (position + 1) // by.rate
    return -(-(ended if by.num_chosen is None else min(ended, by.num_chosen)) // _TILE) * _TILE


def _spans(start: int, end: int, by: Sight) -> Iterator[tuple[int, int]]:
    """Cut the queries at positions [start, end) into spans that see equally many vectors, hidden ones included."""
    while start < end:
        padded, stop = _num_padded(start, by), end
        if by.rate and (by.num_chosen is None or padded < by.num_chosen):
            stop = min(end, (padded + 1) * by.rate - 1)
        stop = min(stop, start + max(1, _GATHERED // (padded + by.window)))
        yield start, stop
        start = stop


def _seen(
    positions: Tensor,
    recent: StoredSequence,
    others: Sequence[StoredSequence],
    by: Sight,
    small: SmallQueries | None,
    num_padded: int,
) -> tuple[Tensor, Tensor]:
    """Return the keys of queries [queries, keys, dim], the last one zeros, and which are hidden [queries, keys]."""
    steps = positions[:, None] - torch.arange(by.window - 1, -1, -1, device=positions.device)
    keys, hidden = _vectors(recent, steps.clamp(min=0)), steps < 0
    dim = keys.shape[2]
    if num_padded:
        (vectors,), ended = others, (positions + 1)[:, None] // by.rate
        numbers = torch.arange(num_padded, device=positions.device).expand(len(positions), -1)
        if small is not None and by.num_chosen is not None and int(ended[-1]) > by.num_chosen:
            numbers = _chosen(positions, vectors, dim, by.num_chosen, small, num_padded)
        # hidden vectors are others: what lies there may be NaN, which a weight of zero would not hide
        own = _vectors(vectors, (torch.minimum(numbers, ended - 1) + 1) * by.rate - 1)[..., :dim]
        keys, hidden = torch.cat((own, keys), 1), torch.cat((numbers >= ended, hidden), 1)
    missing = -(keys.shape[1] + 1) % _TILE
    return F.pad(keys, (0, 0, 0, missing + 1)), F.pad(hidden, (0, missing + 1), value=True)


def _chosen(
    positions: Tensor, vectors: StoredSequence, dim: int, num_chosen: int, small: SmallQueries, num_padded: int
) -> Tensor:
    """Return the numbers of the vectors that queries choose, int64 [queries, num_padded], in ascending order.

    dim: elements before the small key of a vector. A query is scored alone, so that its sums do not depend on those
    beside it.
    """
    device, rate = positions.device, vectors.stride
    counts = [(each + 1) // rate for each in positions.tolist()]
    ends = (torch.arange(counts[-1], device=device) + 1) * rate - 1
    keys = _vectors(vectors, ends)[:, dim:].float()
    found = torch.arange(num_padded, device=device).repeat(len(counts), 1)
    for query, count in enumerate(counts):
        if count <= num_chosen:
            continue
        # a copy begins where every other one does: products may depend on the alignment of their factors
        own = small.queries[query].to(torch.float32, copy=True)
        products = torch.relu(own @ keys[:count].t())  # [heads, vectors]
        scores = (products * small.weights[query][:, None]).sum(0)
        best = scores.sort(descending=True, stable=True).indices[:num_chosen]
        found[query, :num_chosen] = best.sort().values
        found[query, num_chosen:] = count
    return found


def _attend(q: Tensor, keys: Tensor, hidden: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """Attend q [queries, heads, dim] to keys [queries, keys, dim], which are the values too; the last has the sink."""
    heads, missing = q.shape[1], -q.shape[1] % 4
    mask = torch.zeros(hidden.shape, device=q.device).masked_fill(hidden, float("-inf"))
    mask = mask[:, None].repeat(1, heads + missing, 1)
    mask[:, :, -1] = F.pad(sinks, (0, missing))
    both, queries = keys[:, None].float(), F.pad(q.float(), (0, 0, 0, missing))[:, None]
    out = F.scaled_dot_product_attention(queries, both, both, attn_mask=mask[:, None], scale=scale)
    return out[:, 0, :heads].to(q.dtype)


def _step(dtype: torch.dtype, size: int, stride: int, seed: int) -> tuple[Tensor, TokenRows]:
    """Return a cache and a step: a prompt, two decode steps and a later part of a prompt."""
    rows, generator = example_rows((7, 1, 1, 21), (7, 40, 5, 50), 16), torch.Generator().manual_seed(seed)
    return torch.randn(17, -(-16 // stride) * size, generator=generator).to(dtype), rows


def _window_examples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Yield windows that overlap, with two kinds of vectors, and some that do not."""
    for rate, widths, is_overlapping in ((4, (16, 8), True), (6, (12,), False)):
        cache, rows = _step(dtype, 2 * sum(widths), 1, rate)
        biases = [torch.linspace(-1.0, 1.0, rate * width).view(rate, width) for width in widths]
        yield cache, rows, ends_of(rows, rate), biases, dtype, is_overlapping


def _attention_examples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Yield a window alone, one with all vectors before it, and one with vectors that are chosen."""
    heads, dim, small_size = 3, 16, 8
    generator = torch.Generator().manual_seed(0)
    q, sinks = torch.randn(30, heads, dim, generator=generator).to(dtype), torch.linspace(-1.0, 1.0, heads)
    queries = torch.randn(30, 2, small_size, generator=generator).to(dtype)
    small = SmallQueries(queries, torch.rand(30, 2, generator=generator))
    recent, rows = _step(dtype, dim, 1, 1)
    yield q, (recent,), (rows,), Sight(0.25, 7), sinks, None
    for rate, num_chosen, own in ((6, None, None), (4, 3, small)):
        vectors, _ = _step(dtype, dim + (0 if own is None else small_size), rate, 2)
        yield q, (recent, vectors), (rows, rows), Sight(0.25, 7, rate, num_chosen), sinks, own


def _pool_examples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Yield queries that see all tokens or choose some."""
    generator = torch.Generator().manual_seed(0)
    for rate, num_chosen, size in ((4, 3, 8), (3, 1, 12)):
        keys, rows = _step(dtype, size, rate, 3)
        queries = torch.randn(30, 4, size, generator=generator).to(dtype)
        small = SmallQueries(queries, torch.randn(30, 4, generator=generator))
        yield small, keys, rows, rate, num_chosen, (num_chosen + 1) * rate - 1


OPERATORS = (
    Operator("choose_pools", choose_pools, _pool_examples),
    Operator("compressed_windows", compressed_windows, _window_examples),
    Operator("compressed_attention", compressed_attention, _attention_examples),
)
