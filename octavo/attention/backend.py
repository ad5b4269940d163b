"""The protocol behind which attention implementations live."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from octavo.attention.metadata import AttentionMetadata


class Scores(NamedTuple):
    """How a layer scores keys against queries.

    scale: factor of the products. sliding_window: tokens that a query sees, itself included; None for all. soft_cap:
    scores become `cap * tanh(score / cap)`. alibi: float32 [heads], the slope that is added per position of distance.
    sinks: float32 [heads], one more score of every query, which takes part in the softmax and has no value.
    """

    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    alibi: Tensor | None = None
    sinks: Tensor | None = None


class AttentionBackend(Protocol):
    """Stores this step's keys and values in the paged cache and attends over it.

    A backend holds no state of its own between steps: the same object serves all layers.
    """

    name: str
    element_type: torch.dtype
    """Type of the elements of a cache tensor; bytes where values have scales beside them."""

    def cache_shape(self, num_blocks: int, block_size: int, kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Return the shape of one layer's cache; `num_blocks` counts the null block. The cache starts zeroed.

        Block ids index dimension 1, so that copying or moving block `i` is copying `cache[:, i]`.
        """
        ...

    def workspace_bytes(
        self, max_tokens: int, max_length: int, num_heads: int, kv_heads: int, head_dim: int, element_size: int
    ) -> int:
        """Return the most bytes that `run` allocates beside its output, for the memory plan.

        `max_tokens` is the most tokens in one step, `max_length` the longest sequence.
        """
        ...

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: Tensor,
        metadata: AttentionMetadata,
        scores: Scores,
    ) -> Tensor:
        """Write `k`, `v` to their slots, then let every query see its own sequence up to itself.

        `q` is [tokens, heads, dim], `k` and `v` [tokens, kv_heads, dim]; the result is [tokens, heads, dim].
        """
        ...
