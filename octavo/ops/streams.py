"""Several streams of a decoder beside each other, which its layers predict and correct, and gates that few pass.

x of `n` streams is [tokens, n · dim]. Sums over a row are made in an order that follows from its length alone.

Sources: Baykal et al., "Alternating Updates for Efficient Transformers", https://arxiv.org/abs/2301.13310; You et al.,
"Spark Transformer", https://arxiv.org/abs/2506.06644; Kimi K3's release (residuals that are attended to).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.registry import Operator

LEAST_SQUARE: Final = 1e-5
"""The smallest mean square that is assumed for a stream when its size is adjusted."""
PIECE: Final = 8
"""Tokens that are computed at a time on the host, so that intermediate results stay in the processor's caches."""


def in_pieces(num_rows: int | None) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Compute so many leading arguments [tokens, ...] (None: all) in pieces on the host, to the bits of one piece."""

    def wrap(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(function)
        def compute(*arguments: Any) -> Tensor:
            x, rows = arguments[0], arguments[:num_rows]
            if x.device.type != "cpu" or len(x) <= PIECE:
                return function(*arguments)
            pieces = zip(*(each.split(PIECE) for each in rows), strict=True)
            return torch.cat([function(*piece, *arguments[len(rows) :]) for piece in pieces])

        return compute

    return wrap


@in_pieces(2)
def predicted_streams(x: Tensor, states: Tensor, weight: Tensor) -> Tensor:
    """Return each stream of x plus a mixture of all, [tokens, n · dim].

    The factor of stream i in the mixture of stream j is output `j · n + i` of weight [n², n], multiplied with `states`
    float32 [tokens, n].
    """
    tokens, count = states.shape
    streams, factors = (
        x.float().view(tokens, count, x.shape[1] // count),
        _products(states, weight).view(tokens, count, count, 1),
    )
    total, part = streams.clone(), torch.empty_like(streams)
    for each in range(count):
        total += torch.mul(factors[:, :, each], streams[:, each, None], out=part)
    return total.flatten(1).to(x.dtype)


@in_pieces(3)
def corrected_streams(x: Tensor, computed: Tensor, states: Tensor, weight: Tensor, active: int) -> Tensor:
    """Return each stream of x plus a share of what a layer has `computed` [tokens, dim] beyond stream `active`.

    The shares are 1 and the outputs of weight [n, n], multiplied with `states` float32 [tokens, n].
    """
    streams = x.float().view(*states.shape, x.shape[1] // states.shape[1])
    change = computed.float() - streams[:, active]
    shares = _products(states, weight) + 1.0
    return (streams + shares[:, :, None] * change[:, None]).flatten(1).to(x.dtype)


@in_pieces(2)
def add_to_others(x: Tensor, y: Tensor) -> Tensor:
    """Return x with y [tokens, dim] added to every stream but the first one."""
    first, others = x[:, : y.shape[1]], x[:, y.shape[1] :].view(len(x), x.shape[1] // y.shape[1] - 1, y.shape[1])
    return torch.cat((first, (others + y.unsqueeze(1)).flatten(1)), 1)


@in_pieces(2)
def add_to_last(x: Tensor, y: Tensor) -> Tensor:
    """Return x with y [tokens, dim] added to the last stream."""
    before = x.shape[1] - y.shape[1]
    return torch.cat((x[:, :before], x[:, before:] + y), 1)


@in_pieces(1)
def attended_streams(x: Tensor, norm: Tensor, query: Tensor, eps: float) -> Tensor:
    """Return the mean [tokens, dim] of streams, weighed by the softmax of products of `query` with their norms.

    norm, query: float32 [dim], the weight of the norm and what its results are multiplied with.
    """
    streams = x.float().view(len(x), x.shape[1] // len(query), len(query))
    roots = torch.rsqrt(row_sums(streams * streams) / len(query) + eps)
    scores = row_sums(streams * (norm * query)) * roots  # [tokens, n, 1]
    weights = torch.exp(scores - scores.amax(1, keepdim=True))
    total, weighed = weights[:, 0], streams[:, 0] * weights[:, 0]
    for each in range(1, streams.shape[1]):
        total = total + weights[:, each]
        weighed = weighed + streams[:, each] * weights[:, each]
    return (weighed / total).to(x.dtype)


@in_pieces(None)
def spread_streams(*streams: Tensor) -> Tensor:
    """Return streams [tokens, dim] side by side, [tokens, n · dim], each brought to the mean square of the first."""
    return _of_one_size(streams).flatten(1).to(streams[0].dtype)


@in_pieces(None)
def mean_stream(*parts: Tensor) -> Tensor:
    """Return the mean [tokens, dim] of the streams that `spread_streams` returns."""
    streams = _of_one_size(parts)
    total = streams[:, 0]
    for each in range(1, streams.shape[1]):
        total = total + streams[:, each]
    return (total / streams.shape[1]).to(parts[0].dtype)


@in_pieces(1)
def largest_gates(x: Tensor, deviations: float) -> Tensor:
    """Return x - (mean + `deviations` · standard deviation of its row) where that is positive, else 0; x is [tokens,
    dim]."""
    wide, dim = x.float(), x.shape[1]
    mean = row_sums(wide) / dim
    deviation = torch.sqrt(row_sums((wide - mean) * (wide - mean)) / dim)
    return F.relu(wide - (mean + deviation * deviations)).to(x.dtype)


def _of_one_size(parts: tuple[Tensor, ...]) -> Tensor:
    """Return float32 [tokens, n, dim]."""
    streams = torch.stack(parts, 1).float()
    sizes = torch.sqrt(row_sums(streams * streams) / streams.shape[-1])
    factors = sizes[:, :1] / sizes.clamp(min=LEAST_SQUARE**0.5)
    return torch.cat((streams[:, :1], streams[:, 1:] * factors[:, 1:]), 1)


def _products(states: Tensor, weight: Tensor) -> Tensor:
    """Return the outputs [tokens, outputs] of a small weight [outputs, n]."""
    wide = weight.float()
    total = states[:, :1] * wide[:, 0]
    for each in range(1, states.shape[1]):
        total = total + states[:, each, None] * wide[:, each]
    return total


def row_sums(x: Tensor) -> Tensor:
    """Return the sums [..., 1] over rows: halves are added until one element is left."""
    width = x.shape[-1]
    x = F.pad(x, (0, (1 << (width - 1).bit_length()) - width))
    while x.shape[-1] > 1:
        left, right = x.chunk(2, dim=-1)
        x = left + right
    return x


def sigmoid(x: Tensor) -> Tensor:
    """Return `1 / (1 + e^-x)`. Torch's own rounds an element at the end of a tensor in another way than those before
    it."""
    return 1.0 / (1.0 + torch.exp(-x))


def normal(*shape: int) -> Tensor:
    """Return random numbers for examples, float32, the same for a shape each time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def predicted_examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield one token and several pieces, and streams that fill no vector."""
    for tokens, count, dim in ((1, 4, 32), (2 * PIECE + 1, 3, 37)):
        yield normal(tokens, count * dim).to(dtype), normal(tokens, count), normal(count * count, count).to(dtype)


def corrected_examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, int]]:
    """Yield the inputs of `predicted_examples` with another active stream each time."""
    for active, (x, states, weight) in enumerate(predicted_examples(dtype)):
        count = states.shape[1]
        yield x, x[:, : x.shape[1] // count] * 0.5, states, weight[:count], active


def other_examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield streams, and a tensor of the width of one."""
    for x, states, _ in predicted_examples(dtype):
        yield x, x[:, -x.shape[1] // states.shape[1] :] * 0.5


def attended_examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor, float]]:
    """Yield streams with a norm and a query."""
    for x, states, _ in predicted_examples(dtype):
        dim = x.shape[1] // states.shape[1]
        yield x, 1.0 + 0.3 * normal(dim), normal(dim + 1)[1:], 1e-5


def spread_examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, ...]]:
    """Yield streams of other sizes, and some that are nearly nothing."""
    for x, y in other_examples(dtype):
        yield y, *torch.split(x * 3.0, y.shape[1], dim=1)
        yield y, *torch.split(x * 1e-4, y.shape[1], dim=1)


def gate_examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, float]]:
    """Yield cuts below and above the mean."""
    for x, _, _ in predicted_examples(dtype):
        yield x, 1.5
        yield x + 2.0, -0.5


OPERATORS = (
    Operator("predicted_streams", predicted_streams, predicted_examples),
    Operator("corrected_streams", corrected_streams, corrected_examples),
    Operator("add_to_others", add_to_others, other_examples),
    Operator("add_to_last", add_to_last, other_examples),
    Operator("attended_streams", attended_streams, attended_examples),
    Operator("spread_streams", spread_streams, spread_examples),
    Operator("mean_stream", mean_stream, spread_examples),
    Operator("largest_gates", largest_gates, gate_examples),
)
