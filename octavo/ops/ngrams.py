"""Operators on n-grams: the tokens before a token, and the agreement of their vectors with the streams.

x of `n` streams is [tokens, n · dim]. Source: Qwen's releases.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from octavo.ops.recurrent import TokenRows, convolution_examples, state_rows, trial_on_copy
from octavo.ops.registry import Operator
from octavo.ops.streams import PIECE, in_pieces, row_sums, sigmoid

MOST_TOKENS: Final = 1 << 24
"""A state is float32, in which ids up to this one are exact."""
_LEAST: Final = 1e-6
"""The smallest magnitude that is assumed for an agreement, on either side of zero."""


def previous_tokens(ids: Tensor, count: int, stop: int, states: Tensor, metadata: TokenRows) -> Tensor:
    """Return the `count` tokens before each token, the last one first: int64 [tokens, count].

    From the first `stop` on, and where the sequence begins, they are all `stop`. A state [count] has those before the
    next token, the last one first, as differences from `stop`.
    """
    found = ids.new_empty(len(ids), count)
    for row in state_rows(states, metadata):
        # oldest first; each window is what stands before a token, the last one what stands before the next
        windows = torch.cat((row.state.long().flip(0) + stop, ids[row.tokens])).unfold(0, count, 1).flip(1)
        windows = torch.where((windows == stop).cumsum(1) > 0, stop, windows)
        found[row.tokens] = windows[:-1]
        for token, block in row.kept:
            states[block] = (windows[token + 1] - stop).to(states.dtype)
    return found


def dilated_convolution(x: Tensor, weight: Tensor, dilation: int, states: Tensor, metadata: TokenRows) -> Tensor:
    """Return SiLU of the causal convolution of each channel of x [tokens, channels] with weight [taps, channels].

    The taps are those of a token and of each `dilation`-th before it. A state is the last (taps - 1) · dilation inputs,
    oldest first.
    """
    out, taps = torch.empty_like(x), weight.float()
    for row in state_rows(states, metadata):
        inputs = torch.cat((row.state.view(-1, x.shape[1]), x[row.tokens].float()))
        count = len(inputs) - (len(taps) - 1) * dilation
        total = inputs[:count] * taps[0]
        for place, tap in enumerate(taps[1:], 1):
            total = total + inputs[place * dilation : place * dilation + count] * tap
        out[row.tokens] = (total * sigmoid(total)).to(x.dtype)
        for token, block in row.kept:
            states[block] = inputs[token + 1 : token + 1 + (len(taps) - 1) * dilation].flatten()
    return out


@in_pieces(3)
def agreeing_values(keys: Tensor, queries: Tensor, values: Tensor) -> Tensor:
    """Return values [tokens, dim] for each stream, times `sigmoid(root(key · query / sqrt(dim)))`: [tokens, n · dim].

    keys and queries are [tokens, n · dim]; the root keeps the sign. Sums are made in an order that follows from dim.
    """
    dim = values.shape[1]
    products = (keys.float() * queries.float()).view(len(values), -1, dim)
    agreement = row_sums(products) * dim**-0.5
    roots = agreement.abs().clamp(min=_LEAST).sqrt() * agreement.sign()
    return (sigmoid(roots) * values.float()[:, None]).flatten(1).to(values.dtype)


def _token_examples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Yield rows that begin and that go on, with stops among their tokens."""
    for x, *_, states, metadata in list(convolution_examples(dtype))[::2]:
        ids = torch.randint(0, 5, (len(x),), generator=torch.Generator().manual_seed(0))
        yield ids, 2, 3, (states[:, :2] * 2).round(), metadata


def _dilated_examples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Yield two taps of every second token, in channels that fill no vector."""
    for x, weight, _, states, metadata, *gates in convolution_examples(dtype):
        if len(weight) == 3 and not gates:
            yield x, weight[:2].contiguous(), 2, states, metadata


def _value_examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield one token and several pieces, and streams that fill no vector."""
    generator = torch.Generator().manual_seed(2)
    for tokens, count, dim in ((1, 4, 32), (2 * PIECE + 1, 3, 37)):
        keys, queries = torch.randn(2, tokens, count * dim, generator=generator).to(dtype)
        yield keys, queries, torch.randn(tokens, dim, generator=generator).to(dtype)


OPERATORS = (
    Operator("previous_tokens", previous_tokens, _token_examples, trial=trial_on_copy),
    Operator("dilated_convolution", dilated_convolution, _dilated_examples, trial=trial_on_copy),
    Operator("agreeing_values", agreeing_values, _value_examples),
)
