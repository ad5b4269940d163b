"""Hyper-connections: several streams of which a block reads a mixture, and into which it writes shares of its output.

x of `n` streams is [tokens, n · dim]. A matrix mixes the streams between blocks; it is made doubly stochastic, so that
no stream grows (Sinkhorn and Knopp).

Sources: https://arxiv.org/abs/2409.19606, and https://arxiv.org/abs/2512.24880, whose matrix it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.ops.norm import rms_norm
from octavo.ops.registry import Operator
from octavo.ops.streams import PIECE, in_pieces, normal, sigmoid


class Mixing(NamedTuple):
    """How a block joins the streams, float32."""

    read: Tensor
    """[tokens, n]: the weight of each stream in the block's input."""
    write: Tensor
    """[tokens, n]: the weight of the block's output in each stream."""
    mix: Tensor
    """[tokens, n, n]: the share of each stream (dimension 1) that is added to each stream (dimension 2)."""


def stream_weights(products: Tensor, scale: Tensor, base: Tensor, eps: float) -> Tensor:
    """Return `sigmoid(products · scale + base) + eps`, float32 [tokens, n]; scale is [1], base [n]."""
    return sigmoid(products * scale + base) + eps


def stream_mixing(products: Tensor, scale: Tensor, base: Tensor, rounds: int, eps: float) -> Mixing:
    """Return how a block joins the streams, from products float32 [tokens, n · (n + 2)].

    scale [3] and base [n · (n + 2)] are those of the weights of reading, of writing and of the matrix, whose rows and
    columns are divided by their sums so many `rounds`, the first of which has columns alone.
    """
    count = num_mixed(products)
    sections = [count, count, count * count]
    (read, write, mix), (read_base, write_base, mix_base) = (torch.split(e, sections, -1) for e in (products, base))
    mix = (mix * scale[2] + mix_base).view(len(products), count, count)
    mix = torch.exp(mix - mix.amax(-1, keepdim=True))
    mix = mix / mix.sum(-1, keepdim=True) + eps
    mix = mix / (mix.sum(-2, keepdim=True) + eps)
    for _ in range(rounds - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + eps)
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
    written = 2 * sigmoid(write * scale[1] + write_base)
    return Mixing(stream_weights(read, scale[:1], read_base, eps), written, mix)


def plain_mixing(products: Tensor, scale: Tensor, base: Tensor, most: float, eps: float) -> Mixing:
    """Return how a block joins streams that stay what they were, from products float32 [tokens, n + n].

    scale [2] and base [n + n] are those of the weights of reading and of writing; these are at most `most`.
    """
    count = products.shape[1] // 2
    read = stream_weights(products[:, :count], scale[:1], base[:count], eps)
    written = stream_weights(products[:, count:], scale[1:], base[count:], 0.0) * most
    return Mixing(read, written, torch.eye(count, device=products.device).repeat(len(products), 1, 1))


def num_mixed(products: Tensor) -> int:
    """Return how many streams are mixed by products [tokens, n · (n + 2)]."""
    return next(n for n in range(1, products.shape[1] + 1) if n * (n + 2) == products.shape[1])


def normed_streams(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of all streams of a token together, float32 [tokens, n · dim]; weight is float32 [n · dim]."""
    return rms_norm(x.float(), weight, eps)


def repeated_streams(x: Tensor, count: int) -> Tensor:
    """Return x [tokens, dim] as so many streams, [tokens, count · dim]."""
    return x.repeat(1, count)


@in_pieces(2)
def weighed_stream(x: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of streams times weights float32 [tokens, n]: [tokens, dim]."""
    streams = x.float().view(*weights.shape, x.shape[1] // weights.shape[1])
    total = streams[:, 0] * weights[:, :1]
    for each in range(1, weights.shape[1]):
        total = total + streams[:, each] * weights[:, each, None]
    return total.to(x.dtype)


@in_pieces(4)
def mixed_streams(x: Tensor, out: Tensor, write: Tensor, mix: Tensor) -> Tensor:
    """Return the mixed streams of x with shares of a block's `out` [tokens, dim]; `write` and `mix` as in `Mixing`."""
    streams = x.float().view(*write.shape, out.shape[1])
    total = out.float()[:, None] * write[:, :, None]
    for each in range(write.shape[1]):
        total = total + streams[:, each, None] * mix[:, each, :, None]
    return total.flatten(1).to(x.dtype)


def weight_examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor, float]]:
    """Yield one token and several. The weights are float32 for every type of model."""
    for tokens, count in ((1, 4), (9, 3)):
        yield normal(tokens, count), torch.tensor([0.7]), normal(count), 1e-6


def mixing_examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor, int, float]]:
    """Yield the same with matrices."""
    for tokens, count, rounds in ((1, 4, 20), (9, 3, 1)):
        outputs = count * (count + 2)
        yield normal(tokens, outputs), torch.tensor([0.7, 1.2, 0.9]), normal(outputs), rounds, 1e-6


def plain_examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor, float, float]]:
    """Yield the same without matrices."""
    for tokens, count in ((1, 4), (9, 3)):
        yield normal(tokens, 2 * count), torch.tensor([0.7, 1.2]), normal(2 * count), 2.5, 1e-6


def norm_examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Yield one token and several, of widths that fill vectors and do not."""
    for tokens, width in ((1, 128), (9, 111)):
        yield normal(tokens, width).to(dtype), normal(width), 1e-5


def repeated_examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, int]]:
    """Yield one token and several."""
    for tokens, dim, count in ((1, 32, 4), (9, 37, 3)):
        yield normal(tokens, dim).to(dtype), count


def stream_examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one token and several pieces, and streams that fill no vector."""
    for tokens, count, dim in ((1, 4, 32), (2 * PIECE + 1, 3, 37)):
        yield normal(tokens, count * dim).to(dtype), normal(tokens, count)


def mixed_examples(dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield the same with a block's output and a matrix."""
    for x, weights in stream_examples(dtype):
        tokens, count = weights.shape
        yield x, x[:, : x.shape[1] // count] * 0.5, weights, normal(tokens, count, count)


OPERATORS = (
    Operator("stream_weights", stream_weights, weight_examples),
    Operator("stream_mixing", stream_mixing, mixing_examples),
    Operator("plain_mixing", plain_mixing, plain_examples),
    Operator("normed_streams", normed_streams, norm_examples),
    Operator("repeated_streams", repeated_streams, repeated_examples),
    Operator("weighed_stream", weighed_stream, stream_examples),
    Operator("mixed_streams", mixed_streams, mixed_examples),
)
