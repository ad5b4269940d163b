"""The layers between a model's projections and the paged KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import torch
from torch import Tensor, nn

from octavo.attention.backend import AttentionBackend, RotatingBackend, Scores
from octavo.attention.metadata import AttentionMetadata, ModelInput
from octavo.distributed.mesh import Mesh
from octavo.layers.heads import Heads
from octavo.layers.layer import Binding, CachedLayer, TensorSlot
from octavo.ops.rotary import Rotation

ALL_AHEAD: Final = 2**31 - 1
"""Number of tokens after its own that a query sees where it sees all of them."""


class PagedAttention(CachedLayer):
    """Stores keys and values, and attends to the sequence so far.

    `scale` is `1 / sqrt(dim)` unless given; `sliding_window` counts the tokens a query sees, itself included, `ahead`
    those behind it that it sees too.
    """

    def __init__(
        self,
        heads: Heads,
        ahead: int = 0,
        *,
        scale: float | None = None,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.scores = Scores(heads.dim**-0.5 if scale is None else scale, sliding_window, soft_cap, ahead=ahead)
        self._backend: AttentionBackend
        self._rotating: RotatingBackend | None

    @property
    def sees_ahead(self) -> bool:
        return self.scores.ahead > 0 or self.scores.sliding_window == 1

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: ModelInput, rotation: Rotation | None = None) -> Tensor:
        """q [tokens, heads, dim], k and v [tokens, kv_heads, dim] → [tokens, heads · dim].

        q and k are rotated first where `rotation` is given.
        """
        if rotation is not None and self._rotating is None and rotation.q_table is rotation.k_table:
            positions, table, _, *rest = rotation  # as `Rotation.of` does: a call less for each of many layers
            q, k = self.ops.rotary(q, k, positions, table, *rest)
        else:
            q, k, v = self._rotated(q, k, v, batch, rotation)
        cache = batch.kv_caches[self.cache_index]
        metadata = batch.attention[self.cache_group]
        out = self._backend.run(q, k, v, cache, metadata, self.scores)  # [tokens, heads, dim]
        return out.flatten(1)

    def _rotated(
        self, q: Tensor, k: Tensor, v: Tensor, batch: ModelInput, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q rotated, and keys and values that are not in the cache yet."""
        if rotation is None:
            return q, k, v
        if self._rotating is None:
            return *rotation.of(self.ops.rotary, q, k), v
        cache, metadata = batch.kv_caches[self.cache_index], batch.attention[self.cache_group]
        return self._rotating.rotate_and_store(q, k, v, cache, metadata, rotation), k[:0], v[:0]

    def bind(self, binding: Binding) -> None:
        super().bind(binding)
        self._backend = binding.backend
        self._rotating = binding.backend if isinstance(binding.backend, RotatingBackend) else None


class SpanAttention(PagedAttention):
    """Attends where tokens of an image see all of it: the others are causal.

    Attention over such tokens is computed a second time, with what the first left in the cache. A window hides earlier
    keys from them as from other tokens.
    """

    def within(self) -> Scores:
        """Return the scores for tokens of an image: they also see the keys after their own."""
        return self.scores._replace(ahead=ALL_AHEAD)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: ModelInput, rotation: Rotation | None = None) -> Tensor:
        q, k, v = self._rotated(q, k, v, batch, rotation)
        out = super().forward(q, k, v, batch)
        if batch.spans is None:
            return out
        indices, none = batch.spans.token_indices, k[:0]
        metadata, cache = batch.spans.attention[self.cache_group], batch.kv_caches[self.cache_index]
        seen = self._backend.run(q[indices], none, none, cache, metadata, self.within())
        return out.index_copy(0, indices, seen.flatten(1))


class PromptAttention(SpanAttention):
    """Attends where tokens of a prompt see all of it; a window hides keys only from the tokens after the prompt."""

    def within(self) -> Scores:
        """Return the scores for tokens of a prompt: they also see the keys after their own, and a window hides none."""
        return super().within()._replace(sliding_window=None)


class CrossAttention(PagedAttention):
    """Attends to all vectors of an encoder's output, whose keys and values the step that encodes it stores."""

    def attend(self, q: Tensor, batch: ModelInput) -> Tensor:
        """q [tokens, heads, dim] → [tokens, heads · dim]."""
        none = q[:0, : self.heads.kv]
        return self.forward(q, none, none, batch)

    def store(self, k: Tensor, v: Tensor, written: AttentionMetadata, batch: ModelInput) -> None:
        """Write k and v [vectors, kv_heads, dim]."""
        self._backend.run(k, k, v, batch.kv_caches[self.cache_index], written, self.scores)


class SinkAttention(PagedAttention):
    """Attends where each head has a stored score, `sinks`, that takes part in the softmax and has no value."""

    def __init__(
        self, heads: Heads, mesh: Mesh, ahead: int = 0, *, scale: float | None = None, sliding_window: int | None = None
    ) -> None:
        """heads: of all ranks, which share them."""
        super().__init__(heads.share(mesh), ahead, scale=scale, sliding_window=sliding_window)
        start, length = (each // heads.dim for each in heads.query_share(mesh))
        self._rows, self._num_heads = slice(start, start + length), heads.query
        self.weight = nn.Parameter(torch.empty(length), requires_grad=False)

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        """Yield the scores, which stand beside the layer in the checkpoint's tree."""
        yield self.rows_slot(f"{path.rpartition('.')[0]}.sinks", (self._num_heads,), self._rows)

    def finish(self) -> None:
        """Convert the stored scores to the type in which scores are computed."""
        self.scores = self.scores._replace(sinks=self.weight.float())

    def restore(self, state: Mapping[str, Tensor]) -> None:
        super().restore(state)
        self.finish()
