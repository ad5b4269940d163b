"""Attention over latents of tokens that queries choose."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from octavo.attention.backend import Parts
from octavo.attention.metadata import ModelInput
from octavo.layers.layer import CachedLayer
from octavo.ops.chosen_tokens import SmallHeads

_CHOSEN: Final = "chosen tokens"


class ChosenAttention(CachedLayer):
    """Stores latents and, where this layer chooses, the small keys of the choice; attends to the chosen tokens.

    scale: the factor of scores. count: tokens that a query attends to.
    """

    def __init__(self, scale: float, count: int) -> None:
        super().__init__()
        self.scale, self.count = scale, count

    def choose(self, small: SmallHeads, batch: ModelInput) -> None:
        """Choose tokens for this layer and those behind it that choose none, up to the next that does."""
        cache, metadata = batch.kv_caches[self.cache_index][0], batch.attention[self.cache_group]
        self.take(self.ops.choose_tokens(small, cache, metadata, self.count), batch)

    def take(self, chosen: Tensor, batch: ModelInput) -> None:
        """Attend to `chosen` tokens, int32 [tokens, count] as of `attend_chosen`, here and in those layers."""
        batch.attention[0].derived[_CHOSEN] = chosen

    def forward(self, q: Parts, latents: Parts, batch: ModelInput) -> Tensor:
        """q [tokens, heads, latent] and [tokens, heads, turned], latents [tokens, latent] and [tokens, turned].

        Returns weighted sums of latents, [tokens, heads, latent].
        """
        cache, metadata = batch.kv_caches[self.cache_index][0], batch.attention[self.cache_group]
        chosen = batch.attention[0].derived[_CHOSEN]
        out: Tensor = self.ops.attend_chosen(q, latents, cache, metadata, chosen, self.scale)
        return out
