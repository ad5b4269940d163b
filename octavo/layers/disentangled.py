"""Attention whose scores have products of tokens with learned vectors of distances. Source: He et al., DeBERTa,
https://arxiv.org/abs/2006.03654."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octavo.attention.metadata import AttentionMetadata, ModelInput
from octavo.layers.attention import PagedAttention
from octavo.layers.layer import Layer
from octavo.layers.norm import LayerNorm


class _Table(Layer):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width), requires_grad=False)


class RelativePlaces(nn.Module):
    """Vectors of distances, which all layers share. Distances beyond half of `span` share them by logarithm."""

    def __init__(self, span: int, longest: int, width: int, eps: float) -> None:
        """span: vectors to either side. longest: the distance from which on all have the last one."""
        super().__init__()
        self.table, self.norm = _Table(2 * span, width), LayerNorm(width, eps)
        self._span, self._longest = span, longest

    def forward(self, metadata: AttentionMetadata) -> tuple[Tensor, Tensor]:
        """Return the normalised vectors that the prompts of a step need, [places, width], and the rows among them of
        all distances of query and key, int64 [2 · reach + 1] on the host."""
        rows = self._rows(max(metadata.query_lengths, default=1) - 1)
        first, last = int(rows[0]), int(rows[-1])
        return self.norm(self.table.weight[first : last + 1]), rows - first

    def _rows(self, reach: int) -> Tensor:
        half, distances = self._span // 2, torch.arange(-reach, reach + 1)
        far = distances.abs().clamp(min=half).float()
        logarithms = torch.log(far / half) / torch.log(torch.tensor((self._longest - 1) / half)) * (half - 1)
        buckets = torch.where(distances.abs() <= half, distances, (torch.ceil(logarithms) + half) * distances.sign())
        return (buckets.long() + self._span).clamp(0, 2 * self._span - 1)


class DisentangledScores(PagedAttention):
    """Attends where each token of a prompt sees all of it. It leaves the cache alone."""

    @property
    def sees_ahead(self) -> bool:
        return True

    def among(
        self, content: tuple[Tensor, Tensor, Tensor], places: tuple[Tensor, Tensor], rows: Tensor, batch: ModelInput
    ) -> Tensor:
        """Return [tokens, heads · dim]; arguments are those of the operator `disentangled_attention`."""
        lengths = batch.attention[self.cache_group].query_lengths
        out: Tensor = self.ops.disentangled_attention(content, places, rows, lengths, self.scores.scale)
        return out.flatten(1)
