"""Attention to blocks of keys that each query chooses."""

from __future__ import annotations

from torch import Tensor

from octavo.attention.metadata import ModelInput
from octavo.layers.layer import CachedLayer
from octavo.ops.block_sparse import BlockChoice


class BlockSparseAttention(CachedLayer):
    """Stores keys, values and the small keys of the choice, and attends to the blocks that each query chooses."""

    def __init__(self, choice: BlockChoice) -> None:
        super().__init__()
        self.choice = choice

    def forward(self, q: Tensor, k: Tensor, v: Tensor, small: tuple[Tensor, Tensor], batch: ModelInput) -> Tensor:
        """q [tokens, heads, dim], k and v [tokens, kv_heads, dim] → [tokens, heads · dim].

        small: queries [tokens, kv_heads, size] and keys [tokens, size] of the choice.
        """
        cache, metadata = batch.kv_caches[self.cache_index][0], batch.attention[self.cache_group]
        out: Tensor = self.ops.block_sparse_attention(q, k, v, small, cache, metadata, self.choice)
        return out.flatten(1)


class ChosenKeysAttention(CachedLayer):
    """Stores keys and values, and attends to the tokens that are chosen for each query. scale: the factor of scores."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self._scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, batch: ModelInput) -> Tensor:
        """q [tokens, heads, dim], k and v [tokens, kv_heads, dim] → [tokens, heads · dim].

        chosen: int32 [tokens, most], as of `ops.block_sparse.attend_chosen_keys`.
        """
        cache, metadata = batch.kv_caches[self.cache_index][0], batch.attention[self.cache_group]
        out: Tensor = self.ops.attend_chosen_keys(q, k, v, cache, metadata, chosen, self._scale)
        return out.flatten(1)
