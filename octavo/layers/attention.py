"""The layer between a model's projections and the paged KV cache."""

from __future__ import annotations

from torch import Tensor

from octavo.attention.backend import AttentionBackend, Scores
from octavo.attention.metadata import ModelInput
from octavo.layers.heads import Heads
from octavo.layers.layer import Binding, CachedLayer


class PagedAttention(CachedLayer):
    """Stores keys and values, and attends to the sequence so far.

    `scale` is `1 / sqrt(dim)` unless given; `sliding_window` counts the tokens a query sees, itself included.
    """

    def __init__(
        self,
        heads: Heads,
        *,
        scale: float | None = None,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.scores = Scores(heads.dim**-0.5 if scale is None else scale, sliding_window, soft_cap)
        self._backend: AttentionBackend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: ModelInput) -> Tensor:
        """q [tokens, heads, dim], k and v [tokens, kv_heads, dim] → [tokens, heads · dim]."""
        cache = batch.kv_caches[self.cache_index]
        metadata = batch.attention[self.cache_group]
        out = self._backend.run(q, k, v, cache, metadata, self.scores)  # [tokens, heads, dim]
        return out.flatten(1)

    def bind(self, binding: Binding) -> None:
        self._backend = binding.backend
