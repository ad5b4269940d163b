"""Recurrences over the tokens of a sequence, with their states in blocks of a cache, and the norm behind them.

A state is what later tokens need of all earlier ones. Block `table[p // block_size]` of a row holds the state after its
last computed token p. A row whose first token of the step has position c starts from block
`table[(c - 1) // block_size]`, or from zeros where c is 0. The state is written after the last token of each block and
after the row's last token, unless the slot of that token lies in block 0: where the state is not needed, and in rows
that fill a step up. Everything goes token by token, so that a cut of a prompt changes no bit.

`states` is float32 [blocks, values], a part of the layer's cache, which is updated in place.

Sources: Yang, Kautz and Hatamizadeh, "Gated Delta Networks", https://arxiv.org/abs/2412.06464; Dao and Gu,
"Transformers are SSMs" (Mamba2), https://arxiv.org/abs/2405.21060; decays of rows: Kimi Team, "Kimi Linear",
https://arxiv.org/abs/2510.26692; Gu and Dao, "Mamba", https://arxiv.org/abs/2312.00752.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.registry import Operator
from octavo.ops.streams import normal

Limits = tuple[float, float]
NO_LIMITS: Final[Limits] = (0.0, float("inf"))


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Where this step's tokens live in one cache group. Rows are sequences in batch order.

    Row `i` computes `query_lengths[i]` tokens, the last ones of the `lengths[i]` that are in the cache after this
    step. The difference is its context: what earlier steps or a prefix hit left in the cache.
    """

    query_starts: Tensor
    """int32 [rows + 1]: first flat token index of each row, then the number of tokens."""
    sequence_lengths: Tensor
    """int32 [rows]: tokens in the cache after this step, this step's included."""
    block_tables: Tensor
    """int32 [rows, max_blocks]: block ids, padded with 0 (the null block)."""
    slot_mapping: Tensor
    """int64 [tokens]: block * block_size + offset, where each token's key and value go."""
    block_size: int
    """Tokens per block."""
    query_lengths: Sequence[int]
    """[rows] on the host, so that planning needs no copy from the device."""
    lengths: Sequence[int]
    """[rows] on the host: `sequence_lengths` as plain numbers."""
    num_guesses: Sequence[int] = ()
    """[rows] on the host: how many last tokens of each row are guesses, in a group with states; empty for none."""

    @classmethod
    def build(
        cls,
        query_lengths: Sequence[int],
        lengths: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
    ) -> Self:
        """Build all tensors from plain rows; `block_tables[i]` covers `lengths[i]` tokens and may be longer."""
        width = max((len(table) for table in block_tables), default=0)
        padded = [[*table, *(0,) * (width - len(table))] for table in block_tables]
        slots = [
            table[position // block_size] * block_size + position % block_size
            for queries, length, table in zip(query_lengths, lengths, block_tables, strict=True)
            for position in range(length - queries, length)
        ]
        return cls(
            query_starts=torch.tensor([0, *accumulate(query_lengths)], dtype=torch.int32),
            sequence_lengths=torch.tensor(lengths, dtype=torch.int32),
            block_tables=torch.tensor(padded, dtype=torch.int32).view(len(padded), width),
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            block_size=block_size,
            query_lengths=query_lengths,
            lengths=lengths,
        )


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    metadata: TokenRows,
    gates: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the causal convolution of each channel of x [tokens, channels] with weight [taps, channels].

    Its activation is SiLU. With `gates` (before, after), each [tokens, channels], it is the factor `after` of the
    result instead, and x is multiplied by `before`. A state is the last taps - 1 inputs [taps - 1, channels], oldest
    first.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    inputs = x.float() if gates is None else x.float() * gates[0].float()

    def advance(token: int, state: Tensor) -> Tensor:
        window = torch.cat((state, inputs[token]))
        total = (window.view(weight.shape) * weight.float()).sum(0) + (0.0 if bias is None else bias.float())
        out[token] = F.silu(total) if gates is None else total * gates[1][token].float()
        return window[x.shape[1] :]

    _advance_rows(states, metadata, advance)
    return out


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: Tensor,
    beta: Tensor,
    numbers: tuple[Tensor, ...],
    states: Tensor,
    metadata: TokenRows,
) -> Tensor:
    """Return `S^T query / sqrt(key_dim)` of every head [tokens, heads, value_dim], after S of each token is

    `decay · S + key (factor · sigmoid(beta) · (value - (decay · S)^T key))^T`, decay being `exp(-exp(decay_log) ·
    softplus(step + step_bias))`. query and key [tokens, key_heads, key_dim] are brought to length 1, and each serves as
    many heads as there are for it; value is [tokens, heads, value_dim], step and beta are [tokens, heads]. `numbers`
    are decay_log, step_bias and factor, float32 [heads]; the last one is 1 unless given. With step [tokens, heads ·
    key_dim] and step_bias [heads · key_dim] each row of S has a decay of its own. A state is S [heads, key_dim,
    value_dim].
    """
    decay_log, step_bias, *factors = numbers
    decay_log = decay_log.repeat_interleave(step.shape[1] // value.shape[1])

    def decay_of(token: int) -> Tensor:
        return _decay(step[token], decay_log, step_bias)[1]

    return _delta_rule((query, key, value, beta), decay_of, factors, states, metadata)


def bounded_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: Tensor,
    beta: Tensor,
    numbers: tuple[Tensor, Tensor, float],
    states: Tensor,
    metadata: TokenRows,
) -> Tensor:
    """Return what `gated_delta_rule` does with a decay for each row of S, which is

    `exp(-bound · sigmoid(exp(decay_log) · (step + step_bias)))`. `numbers` are decay_log, float32 [heads], step_bias,
    float32 [heads · key_dim], and bound; step is [tokens, heads · key_dim].
    """
    decay_log, step_bias, bound = numbers
    rate = decay_log.exp().repeat_interleave(key.shape[2])

    def decay_of(token: int) -> Tensor:
        return torch.exp(-bound * torch.sigmoid(rate * (step[token].float() + step_bias)))

    return _delta_rule((query, key, value, beta), decay_of, (), states, metadata)


def _delta_rule(
    inputs: tuple[Tensor, ...],
    decay_of: Callable[[int], Tensor],
    factors: Sequence[Tensor],
    states: Tensor,
    metadata: TokenRows,
) -> Tensor:
    """Return the result of the delta rule. decay_of: returns the decays of a token, one for each head or row of S."""
    query, key, value, beta = inputs
    heads, (key_heads, key_dim), value_dim = value.shape[1], key.shape[1:], value.shape[2]
    out, repeats = torch.empty(value.shape, dtype=value.dtype, device=value.device), heads // key_heads

    def advance(token: int, state: Tensor) -> Tensor:
        q, k = (_of_length_one(each[token].float()).repeat_interleave(repeats, 0) for each in (query, key))
        kept = state.view(heads, key_dim, value_dim) * decay_of(token).view(heads, -1, 1)
        change = value[token].float() - (kept * k[:, :, None]).sum(1)
        opened = torch.sigmoid(beta[token].float())
        for factor in factors:
            opened = opened * factor
        kept = kept + k[:, :, None] * (change * opened[:, None])[:, None]
        out[token] = (kept * (q * key_dim**-0.5)[:, :, None]).sum(1)
        return kept.flatten()

    _advance_rows(states, metadata, advance)
    return out


def mamba2_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: Tensor,
    numbers: tuple[Tensor, Tensor, Tensor],
    limits: Limits,
    states: Tensor,
    metadata: TokenRows,
) -> Tensor:
    """Return `S^T query + skip · value` of every head [tokens, heads, value_dim], after S of each token is

    `decay · S + key (dt value)^T`. dt is `softplus(step + step_bias)` within `limits`, decay is `exp(-exp(decay_log) ·
    dt)`. query and key (C and B of the paper) are [tokens, groups, key_dim], value (x) [tokens, heads, value_dim], step
    [tokens, heads], and `numbers` decay_log, step_bias and skip, float32 [heads]. A state is S [heads, key_dim,
    value_dim].
    """
    heads, (groups, key_dim), value_dim = value.shape[1], key.shape[1:], value.shape[2]
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    repeats = heads // groups

    def advance(token: int, state: Tensor) -> Tensor:
        q, k = (each[token].float().repeat_interleave(repeats, 0) for each in (query, key))
        dt, decay = _decay(step[token], *numbers[:2], limits)
        x = value[token].float()
        kept = state.view(heads, key_dim, value_dim) * decay[:, None, None] + k[:, :, None] * (x * dt[:, None])[:, None]
        out[token] = (kept * q[:, :, None]).sum(1) + x * numbers[2][:, None]
        return kept.flatten()

    _advance_rows(states, metadata, advance)
    return out


def selective_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: Tensor,
    numbers: tuple[Tensor, Tensor, Tensor],
    states: Tensor,
    metadata: TokenRows,
) -> Tensor:
    """Return Mamba's `S^T query + skip · value` [tokens, channels], after S of each token is

    `exp(-rates · dt) · S + key (dt · value)^T`, dt being `softplus(step + step_bias)` of each channel. query and key (C
    and B of the paper) are [tokens, state size], value (x) and step [tokens, channels]. `numbers` are rates, float32
    [state size, channels], which are those of the paper's A without its sign, and step_bias and skip, float32
    [channels]. A state is S [state size, channels].
    """
    rates, step_bias, skip = numbers
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)

    def advance(token: int, state: Tensor) -> Tensor:
        dt, x = F.softplus(step[token].float() + step_bias), value[token].float()
        kept = state.view(rates.shape) * torch.exp(-rates * dt) + key[token].float()[:, None] * (x * dt)
        out[token] = (kept * query[token].float()[:, None]).sum(0) + x * skip
        return kept.flatten()

    _advance_rows(states, metadata, advance)
    return out


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, is_gate_first: bool = False
) -> Tensor:
    """Return `rms_norm(x) · silu(gate)`, each [tokens, dim], or with `is_gate_first` `rms_norm(x · silu(gate))`.

    The norm is one of each `group` elements; weight is [dim], or [group] for all of them.
    """
    factor, wide = F.silu(gate.float()), x.float()
    if is_gate_first:
        wide = wide * factor
    groups = F.rms_norm(wide.reshape(len(x), -1, group), (group,), None, eps) * weight.float().view(-1, group)
    normed = groups.flatten(1)
    return (normed if is_gate_first else normed * factor).to(x.dtype)


class StateRow(NamedTuple):
    """A sequence of a step whose layers keep a state."""

    tokens: slice
    """The tokens of the step."""
    state: Tensor
    """The state from which it starts."""
    kept: list[tuple[int, int]]
    """The tokens, counted from the first of the row, after which the state is kept, and the blocks where."""


def state_rows(states: Tensor, metadata: TokenRows) -> Iterator[StateRow]:
    """Yield the rows of a step. states: [blocks, values]."""
    if states.is_meta:
        return
    assert not metadata.num_guesses, "rows with guesses come in turns (layers/turns.py)"
    size, first = metadata.block_size, 0
    tables, slots = metadata.block_tables.tolist(), metadata.slot_mapping.tolist()
    for table, length, count in zip(tables, metadata.lengths, metadata.query_lengths, strict=True):
        start = length - count
        state = states[table[(start - 1) // size]] if start else torch.zeros_like(states[0])
        ends = [each for each in range(count) if each + 1 == count or (start + each + 1) % size == 0]
        blocks = [(each, slots[first + each] // size) for each in ends]
        yield StateRow(slice(first, first + count), state, [each for each in blocks if each[1]])
        first += count


def _advance_rows(states: Tensor, metadata: TokenRows, advance: Callable[[int, Tensor], Tensor]) -> None:
    """Go through the tokens of each row with `advance(token, state)`, which returns the state after the token."""
    for row in state_rows(states, metadata):
        state, kept = row.state, dict(row.kept)
        for place in range(row.tokens.stop - row.tokens.start):
            state = advance(row.tokens.start + place, state)
            if place in kept:
                states[kept[place]] = state


def _of_length_one(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _decay(step: Tensor, decay_log: Tensor, step_bias: Tensor, limits: Limits = NO_LIMITS) -> tuple[Tensor, Tensor]:
    """Return (dt, decay), each [heads]."""
    dt = F.softplus(step.float() + step_bias).clamp(*limits)
    return dt, torch.exp(-torch.exp(decay_log) * dt)


def _example_rows(values: int) -> Iterator[tuple[Tensor, TokenRows]]:
    """Yield states with the rows of a step: cut prompts, a decoding row, unwanted states, and a row that starts."""
    generator = torch.Generator().manual_seed(1)
    for counts, lengths, tables in (
        ((1,), (1,), [[3]]),
        ((1, 21, 6), (18, 21, 22), [[4, 1, 8], [0, 2, 0], [5, 6, 7]]),
    ):
        yield torch.randn(9, values, generator=generator), TokenRows.build(counts, lengths, tables, 8)


def convolution_examples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Yield channels that fill no vector, with a bias and with gates."""
    for taps, channels in ((4, 37), (3, 160)):
        for states, metadata in _example_rows((taps - 1) * channels):
            x, before, after = normal(sum(metadata.query_lengths), 3 * channels).to(dtype).chunk(3, dim=1)
            weight = normal(taps, channels).to(dtype)
            yield x, weight, weight[0].contiguous(), states, metadata
            yield x, weight, None, states, metadata, (before, after)


def delta_examples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Yield heads that share keys, columns that fill no vector, and each with factors and decays of rows."""
    for key_heads, heads, key_dim, value_dim in ((2, 4, 8, 12), (1, 2, 64, 80)):
        for states, metadata in _example_rows(heads * key_dim * value_dim):
            tokens = sum(metadata.query_lengths)
            sizes = [key_heads * key_dim, key_heads * key_dim, heads * value_dim]
            parts = torch.split(normal(tokens, sum(sizes)).to(dtype), sizes, dim=1)
            step, beta = normal(tokens, 2 * heads).to(dtype).chunk(2, dim=1)
            counts = key_heads, key_heads, heads
            views = [part.view(tokens, count, -1) for part, count in zip(parts, counts, strict=True)]
            yield *views, step, beta, (normal(heads), normal(heads + 1)[:heads]), states, metadata
            steps, biases = normal(tokens, heads * key_dim).to(dtype), normal(heads * key_dim)
            yield *views, steps, beta, (normal(heads), biases, normal(heads).abs()), states, metadata


def bounded_examples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Yield the inputs of `delta_examples` that have decays of rows, with a bound."""
    for *inputs, numbers, states, metadata in delta_examples(dtype):
        if len(numbers) > 2:
            yield *inputs, (*numbers[:2], 5.0), states, metadata


def mamba2_examples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Yield inputs of `delta_examples` without factors, with limits of the time step."""
    for q, k, v, step, _, (decay_log, step_bias, *others), states, metadata in delta_examples(dtype):
        if not others:
            yield q, k, v, step, (decay_log, step_bias, step_bias * 0.5), (0.1, 1.5), states, metadata


def scan_examples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Yield channels that fill no vector, and more than a task of a kernel has."""
    for channels, size in ((37, 4), (160, 16)):
        for states, metadata in _example_rows(size * channels):
            parts = normal(sum(metadata.query_lengths), 2 * (size + channels)).to(dtype)
            numbers = normal(size, channels).exp(), normal(channels), normal(channels + 1)[:channels]
            yield *torch.split(parts, [size, size, channels, channels], dim=1), numbers, states, metadata


def gated_norm_examples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Yield one weight for all groups, and one for the whole row."""
    x, gate = normal(3, 96).to(dtype).chunk(2, dim=1)
    yield x, gate, normal(12).to(dtype), 1e-5, 12
    yield x, gate, normal(48).to(dtype), 1e-5, 24, True


def trial_on_copy(function: Callable[..., Tensor], *arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the result and the states or the cache after it, which are the argument before the rows; it is not
    changed."""
    place = next(i for i, each in enumerate(arguments) if isinstance(each, TokenRows)) - 1
    kept = arguments[place].clone()
    return function(*arguments[:place], kept, *arguments[place + 1 :]), kept


OPERATORS = (
    Operator("short_convolution", short_convolution, convolution_examples, trial=trial_on_copy),
    Operator("gated_delta_rule", gated_delta_rule, delta_examples, trial=trial_on_copy),
    Operator("bounded_delta_rule", bounded_delta_rule, bounded_examples, trial=trial_on_copy),
    Operator("mamba2_scan", mamba2_scan, mamba2_examples, trial=trial_on_copy),
    Operator("selective_scan", selective_scan, scan_examples, trial=trial_on_copy),
    Operator("gated_rms_norm", gated_rms_norm, gated_norm_examples),
)
