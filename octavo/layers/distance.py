"""Attention whose scores depend on the distance of key and query, and the biases of these scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.distributed.mesh import Mesh
from octavo.layers.attention import PagedAttention
from octavo.layers.heads import Heads
from octavo.layers.layer import Binding, Layer
from octavo.ops.rotary import Rotation


class DistanceBiases(Layer):
    """The biases that all layers add to scores; `table` is float32 [this rank's heads, 2 · reach + 1]."""

    table: Tensor


class BucketBiases(DistanceBiases):
    """A stored number for each bucket of distances and each head: near distances have buckets of their own, those up to
    `reach` share them by logarithm. Source: Raffel et al., https://arxiv.org/abs/1910.10683."""

    def __init__(self, num_buckets: int, heads: int, own: slice, reach: int = 128) -> None:
        """own: those of the heads that this rank has."""
        super().__init__()
        self._own = own
        self.weight = nn.Parameter(torch.empty(num_buckets, heads), requires_grad=False)
        self._reach = reach

    def finish(self) -> None:
        """Make the table of the stored numbers."""
        half, reach = len(self.weight) // 2, self._reach
        near = half // 2
        distances = torch.arange(reach + 1).float()
        logarithms = torch.log(distances.clamp(min=1) / near) / math.log(reach / near) * (half - near)
        buckets = torch.where(distances < near, distances, (near + logarithms.trunc()).clamp(max=half - 1)).long()
        # keys before the query, nearest last, and those behind it
        both = torch.cat((buckets.flip(0), buckets[1:] + half)).to(self.weight.device)
        self.table = self.weight.float()[both].T[self._own].contiguous()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        super().restore(state)
        self.finish()


class SlopeBiases(DistanceBiases):
    """ALiBi in both directions: each head lowers the score by its slope for each token of distance."""

    def __init__(self, heads: int, reach: int, own: slice) -> None:
        """own: those of the heads that this rank has."""
        super().__init__()
        self._slopes, self._reach = alibi_slopes(heads)[own], reach

    def bind(self, binding: Binding) -> None:
        super().bind(binding)
        distances = torch.arange(-self._reach, self._reach + 1).abs().float()
        self.table = (-torch.tensor(self._slopes)[:, None] * distances).to(binding.device)


class SlopeAttention(PagedAttention):
    """Attends where each head lowers the score by its slope for each token of distance (ALiBi)."""

    def __init__(self, heads: Heads, mesh: Mesh, slopes: Sequence[float], scale: float | None = None) -> None:
        """heads, slopes: of all ranks, which share them."""
        super().__init__(heads.share(mesh), scale=scale)
        start, length = (each // heads.dim for each in heads.query_share(mesh))
        self._slopes = slopes[start : start + length]

    def bind(self, binding: Binding) -> None:
        super().bind(binding)
        self.scores = self.scores._replace(alibi=torch.tensor(self._slopes, device=binding.device))


class DistanceAttention(PagedAttention):
    """Attends where each token of a prompt sees all of it, and scores have `biases`. It leaves the cache alone."""

    def __init__(self, heads: Heads, biases: DistanceBiases) -> None:
        super().__init__(heads)
        self._shared = (biases,)  # a module of the model, not of each layer

    @property
    def sees_ahead(self) -> bool:
        return True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: ModelInput, rotation: Rotation | None = None) -> Tensor:
        lengths = batch.attention[self.cache_group].query_lengths
        out: Tensor = self.ops.distance_attention(q, k, v, self._shared[0].table, lengths, self.scores.scale)
        return out.flatten(1)


def alibi_slopes(heads: int, largest: float = 8.0) -> tuple[float, ...]:
    """Return the slope of each head: powers of two that end with 2^-largest.

    Heads beyond a power of two have every second slope of the next power. Source: https://arxiv.org/abs/2108.12409.
    """
    known = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-largest * (head + 1) / known) for head in range(known)]
    slopes += [2 ** (-largest * (head + 1) / (2 * known)) for head in range(0, 2 * (heads - known), 2)]
    return tuple(slopes)
