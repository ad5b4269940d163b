"""The choice of tokens, and attention to them: the kernel of paged attention over copies of what queries chose.

Tokens that queries chose are copied side by side, as sequences of their own; so the order of sums is that of the kernel
over the chosen tokens (csrc/cpu/attention/attention.h), and a query's result has the same bits in any step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.attention.backend import Parts
from octavo.devices.cpu.attention import TILE_KEYS, CpuBackend, token_stride
from octavo.devices.cpu.runtime import FLOAT_TYPES, TYPE_CODES, CpuRuntime, dense, lacks
from octavo.ops import chosen_tokens
from octavo.ops.chosen_tokens import SmallHeads
from octavo.ops.recurrent import TokenRows
from octavo.ops.registry import Implementation
from octavo.ops.stored_rows import stored_sequences


class _Copies(NamedTuple):
    """What some neighbouring tokens of a step attend to: rows of them, with the latents that each row sees."""

    first: int
    """The first token."""
    counts: list[int]
    """Tokens of each row."""
    latents: list[Tensor]
    """For each row, [seen, size]."""


def make_choose_tokens(runtime: CpuRuntime) -> Callable[..., Tensor]:
    """Make `octavo.ops.chosen_tokens.choose_tokens`; of other types the reference."""
    cpu, empty = runtime.cpu, runtime.empty

    def choose_tokens(small: SmallHeads, cache: Tensor, metadata: TokenRows, count: int) -> Tensor:
        if small.queries.dtype not in FLOAT_TYPES or cache.dtype not in FLOAT_TYPES:
            return chosen_tokens.choose_tokens(small, cache, metadata, count)
        (tokens, heads, size), weights, width = small.queries.shape, dense(small.weights), cache.element_size()
        chosen = empty((tokens, count), torch.int32)
        if chosen.is_meta:
            return chosen
        num_values, block_size = cache.shape[1] // metadata.block_size, metadata.block_size
        chosen_tokens.store(small.keys, cache, metadata, num_values - size)
        keys = cache.data_ptr() + (num_values - size) * width
        for each, table in zip(stored_sequences(cache, metadata), metadata.block_tables, strict=True):
            step = max(1, chosen_tokens.MOST_SCORES // each.length)
            for start in range(0, len(each.tokens), step):
                part = each.tokens[start : start + step]
                scores, token = empty((len(part), each.length), torch.float32), part.start
                cpu.choose_tokens(
                    *(small.queries[token:].data_ptr(), weights[token:].data_ptr(), keys, table.data_ptr()),
                    *(scores.data_ptr(), chosen[token:].data_ptr(), token_stride(small.queries)),
                    *(cache.stride(0) * width, num_values * width, each.length, len(part), each.start + start),
                    *(heads, size, block_size, count, TYPE_CODES[small.queries.dtype], TYPE_CODES[cache.dtype]),
                )
        return chosen

    return choose_tokens


def make_attend_chosen(runtime: CpuRuntime) -> Callable[..., Tensor]:
    """Make `octavo.ops.chosen_tokens.attend_chosen`; of sizes that the kernels do not take, and with sinks, the
    reference."""
    cpu, empty = runtime.cpu, runtime.empty

    def attend(q: Parts, out: Tensor, copies: _Copies, scale: float) -> None:
        value_size, size, code = q[0].shape[2], q[0].shape[2] + q[1].shape[2], TYPE_CODES[out.dtype]
        lengths = [len(each) for each in copies.latents]
        tiles = [-(-length // TILE_KEYS) for length in lengths]
        latents = torch.cat(copies.latents).to(out.dtype)
        blocks = torch.split(torch.arange(sum(tiles), dtype=torch.int32), tiles)
        tables = torch.nn.utils.rnn.pad_sequence(list(blocks), batch_first=True)
        slots = torch.cat(
            [table[0].long() * TILE_KEYS + torch.arange(length) for table, length in zip(tables, lengths, strict=True)]
        )
        starts = torch.tensor([0, *copies.counts]).cumsum(0).to(torch.int32)
        ends, block_bytes = torch.tensor(lengths, dtype=torch.int32), 0
        block_bytes = cpu.attention_block_bytes(1, size, value_size, TILE_KEYS, code)
        cache = empty((sum(tiles) * block_bytes,), torch.uint8)
        cpu.latent_attention(
            *(each[copies.first :].data_ptr() for each in q),
            *(latents.data_ptr(), latents[:, value_size:].data_ptr(), out[copies.first :].data_ptr()),
            *(each.data_ptr() for each in (cache, starts, ends, tables, slots)),
            *(token_stride(each) if each.shape[2] else 0 for each in q),
            *(size, size, tables.stride(0), block_bytes, len(latents), len(tables), out.shape[1]),
            *(size, value_size, TILE_KEYS, code, code, scale),
        )

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
        if sinks is not None or CpuBackend.obstacle(dtype, dtype, [size], TILE_KEYS) is not None:
            return chosen_tokens.attend_chosen(q, latents, cache, metadata, chosen, scale, sinks)
        out = empty((tokens, heads, value_size), dtype)
        if out.is_meta:
            return out
        chosen_tokens.store(torch.cat(latents, dim=1), cache, metadata, 0)
        for copies in _copies(cache, metadata, chosen, size):
            attend(q, out, copies, scale)
        return out

    return attend_chosen


def _copies(cache: Tensor, metadata: TokenRows, chosen: Tensor, size: int) -> Iterator[_Copies]:
    """Yield what the tokens of a step attend to, in their order and in parts whose copies are bounded."""
    made = _Copies(0, [], [])
    for num_queries, latents in _rows(cache, metadata, chosen, size):
        if made.counts and sum(map(len, made.latents)) + len(latents) > chosen_tokens.GATHERED_TOKENS:
            yield made
            made = _Copies(made.first + sum(made.counts), [], [])
        made.counts.append(num_queries)
        made.latents.append(latents)
    if made.counts:
        yield made


def _rows(cache: Tensor, metadata: TokenRows, chosen: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    """Yield queries that see the same latents, but for those behind them: how many, and the latents [seen, size]."""
    count = chosen.shape[1]
    for each in stored_sequences(cache, metadata):
        # those that see no more than they would choose share their copies
        dense = min(each.length, count) - each.start
        if dense > 0:
            yield dense, each.rows(torch.arange(each.start + dense), 0, size)
        for token in each.tokens[max(dense, 0) :]:
            own = chosen[token].long()
            yield 1, each.rows(own[own >= 0], 0, size)


IMPLEMENTATIONS = (
    Implementation("choose_tokens", "native", make_choose_tokens, lacks("choose_tokens")),
    Implementation("attend_chosen", "native", make_attend_chosen),
)
