"""Attention over latents of tokens that queries choose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor, nn

from octavo.attention.backend import Parts
from octavo.attention.metadata import ModelInput
from octavo.layers.layer import CachedLayer, TensorSlot
from octavo.ops.chosen_tokens import SmallHeads

_CHOSEN: Final = "chosen tokens"


class TokenChoice(CachedLayer):
    """Stores the small keys of a choice of `count` tokens."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def choose(self, small: SmallHeads, batch: ModelInput) -> None:
        """Choose tokens for this layer and for the next layers, up to the next one that chooses."""
        cache, metadata = batch.kv_caches[self.cache_index][0], batch.attention[self.cache_group]
        self.take(self.ops.choose_tokens(small, cache, metadata, self.count), batch)

    def take(self, chosen: Tensor, batch: ModelInput) -> None:
        """Attend to `chosen` tokens, int32 [tokens, count] as of `attend_chosen`, in this layer and the next ones."""
        batch.attention[0].derived[_CHOSEN] = chosen


class ChosenAttention(TokenChoice):
    """Stores latents and, where this layer chooses, the small keys of the choice; attends to the chosen tokens.

    scale: the factor of scores. count: tokens that a query attends to.
    """

    def __init__(self, scale: float, count: int) -> None:
        super().__init__(count)
        self.scale = scale

    def forward(self, q: Parts, latents: Parts, batch: ModelInput) -> Tensor:
        """q [tokens, heads, latent] and [tokens, heads, turned], latents [tokens, latent] and [tokens, turned], or
        none where the layer reads those of another.

        Returns weighted sums of latents, [tokens, heads, latent].
        """
        cache, metadata = batch.kv_caches[self.cache_index][0], batch.attention[self.cache_group]
        chosen = batch.attention[0].derived[_CHOSEN]
        return self.ops.attend_chosen(q, latents, cache, metadata, chosen, self.scale, *self.others())

    def others(self) -> tuple[Tensor, ...]:
        """Return further arguments of the operator."""
        return ()


class SinkChosenAttention(ChosenAttention):
    """Attends where each head has a stored score, `sinks` beside the layer, that takes part in the softmax and has no
    value. `own` are this rank's of `heads`."""

    parameter_dtype = torch.float32

    def __init__(self, scale: float, count: int, heads: int, own: slice) -> None:
        super().__init__(scale, count)
        self._heads, self._own = heads, own
        self.weight = nn.Parameter(torch.empty(own.stop - own.start), requires_grad=False)

    def others(self) -> tuple[Tensor, ...]:
        return (self.weight,)

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        yield self.rows_slot(f"{path.rpartition('.')[0]}.sinks", (self._heads,), self._own)
