"""The protocol behind which attention implementations live."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from octavo.attention.metadata import AttentionMetadata
from octavo.core.model_shape import Encoded, Indexed, IndexedLatent, Kept, KeysAndValues, Latent, Spaced, State
from octavo.ops.rotary import Rotation


class Scores(NamedTuple):
    """How a layer scores keys against queries.

    scale: factor of the products. sliding_window: tokens that a query sees, itself included; None for all. soft_cap:
    scores become `cap * tanh(score / cap)`. alibi: float32 [heads], the slope that is added per position of distance.
    sinks: float32 [heads], one more score of every query, which takes part in the softmax and has no value. ahead: keys
    behind a query that it sees too, of those that are in the cache after the step; 0 where attention is causal.
    """

    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    alibi: Tensor | None = None
    sinks: Tensor | None = None
    ahead: int = 0


Parts: TypeAlias = tuple[Tensor, Tensor]
"""Queries or latents: the elements that are the value too, and the rest."""


class StepSizes(NamedTuple):
    """The largest steps of a layer. value_size: as in `AttentionBackend.cache_shape`."""

    max_tokens: int
    """Most tokens in one step."""
    max_length: int
    """Tokens of the longest sequence."""
    num_heads: int
    kv_heads: int
    head_dim: int
    element_size: int
    value_size: int = 0


class CacheLayout(NamedTuple):
    """The cache of one layer: a tensor whose dimension 1 counts blocks, the null block included, and its type."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class AttentionBackend(Protocol):
    """Stores this step's keys and values in the paged cache and attends over it.

    A backend holds no state of its own between steps: the same object serves all layers.
    """

    name: str
    element_type: torch.dtype
    """Type of the elements of a cache tensor; bytes where values have scales beside them."""

    def cache_shape(
        self, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, value_size: int = 0
    ) -> tuple[int, ...]:
        """Return the shape of one layer's cache; `num_blocks` counts the null block. The cache starts zeroed.

        value_size: for latents, one head of `head_dim`, the elements that are the value; else 0. Block ids index
        dimension 1, so that copying or moving block `i` is copying `cache[:, i]`.
        """

    def workspace_bytes(self, sizes: StepSizes) -> int:
        """Return the most bytes that `run` or `run_latents` allocates beside its output, for the memory plan."""

    def gathered_bytes(self, sizes: StepSizes, num_keys: int) -> int:
        """Return the bytes that kernels take where each query sees up to `num_keys` vectors of its own; 0 where torch
        computes, whose bytes the operators count."""
        ...

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, metadata: AttentionMetadata, scores: Scores
    ) -> Tensor:
        """Write `k`, `v` to their slots, then let every query see its own sequence up to itself, and what scores say.

        `q` is [tokens, heads, dim], `k` and `v` [tokens, kv_heads, dim]; the result is [tokens, heads, dim]. With
        `k` and `v` [0, kv_heads, dim] nothing is written: another layer has filled the cache.
        """

    def run_latents(self, q: Parts, latents: Parts, cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
        """Write `latents` to their slots, then let every query see those of its own sequence up to itself.

        `q` is [tokens, heads, value_size] and [tokens, heads, rest], `latents` [tokens, value_size] and [tokens, rest];
        the result is [tokens, heads, value_size].
        """


@runtime_checkable
class RotatingBackend(Protocol):
    """An `AttentionBackend` that rotates heads where it writes keys to the cache."""

    def rotate_and_store(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, metadata: AttentionMetadata, rotation: Rotation
    ) -> Tensor:
        """Write k [tokens, kv_heads, dim], rotated, and `v` to their slots, and return q [tokens, heads, dim] rotated.

        The bits are those of the operator `rotary` and of `run`, which is called next, without keys and values.
        """


def cache_layout(backend: AttentionBackend, keeps: Kept, num_blocks: int, block_size: int) -> CacheLayout:
    """Return the layout of the cache of a layer that keeps this on a rank.

    States are float32 in any backend. Chosen keys and spaced vectors are read by operators, not by the backend: they
    lie one after the other, and in bfloat16 where the backend quantises.
    """
    match keeps:
        case KeysAndValues(kv_heads, head_dim) | Encoded(kv_heads, head_dim):
            return CacheLayout(backend.cache_shape(num_blocks, block_size, kv_heads, head_dim), backend.element_type)
        case Latent(size, value_size):
            shape = backend.cache_shape(num_blocks, block_size, 1, size, value_size)
            return CacheLayout(shape, backend.element_type)
        case Indexed() | IndexedLatent():
            return CacheLayout((1, num_blocks, block_size * keeps.num_values), _plain_type(backend))
        case Spaced():
            return CacheLayout((1, num_blocks, keeps.per_block(block_size) * keeps.size), _plain_type(backend))
        case State(num_values):
            return CacheLayout((1, num_blocks, num_values), torch.float32)


def _plain_type(backend: AttentionBackend) -> torch.dtype:
    return backend.element_type if backend.element_type.is_floating_point else torch.bfloat16
