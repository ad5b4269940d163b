"""Reads and writes KV blocks as bytes, by layer and by heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.core.model_shape import CacheGroup


class BlockIO:
    """The blocks of one rank. Layers and heads have their numbers in the whole model.

    In a block of any attention backend the heads follow each other, each with as many bytes: in the caches of the
    compiled kernels in one plane, in those of the reference one plane of keys and one of values. So some heads of some
    blocks are one tensor, uint8 [planes, blocks, heads, bytes of a head], which depends on no number of ranks.
    """

    def __init__(
        self, caches: Sequence[Tensor], groups: Sequence[CacheGroup], num_heads: int, first: tuple[int, int] = (0, 0)
    ) -> None:
        """caches: of each layer, blocks in dimension 1. groups: the layers by cache group, counted from the first one
        here. num_heads: KV heads in each cache. first: the layer and the head of the whole model that are first here.
        """
        first_layer, first_head = first
        self.layers = range(first_layer, first_layer + len(caches))
        self.heads = range(first_head, first_head + num_heads)
        self.num_groups = len(groups)
        self._group_of = {first_layer + layer: place for place, group in enumerate(groups) for layer in group.layers}
        views = [cache.view(*cache.shape[:2], num_heads, -1).view(torch.uint8) for cache in caches]
        self._views = [view.view(_widest(view.shape[3])) for view in views]

    def group_of(self, layer: int) -> int:
        """Return the cache group that has a layer."""
        return self._group_of[layer]

    def shape(self, layer: int, num_blocks: int, heads: range) -> tuple[int, ...]:
        """Return the shape of what `read` returns."""
        view = self._view(layer)
        return view.shape[0], num_blocks, len(heads), view.shape[3] * view.element_size()

    def read(self, layer: int, block_ids: Sequence[int], heads: range) -> Tensor:
        """Return a copy of these heads of these blocks, uint8 [planes, blocks, heads, bytes of a head]."""
        view = self._view(layer)
        index = torch.tensor(block_ids, device=view.device)
        return self._cut(view, heads).index_select(1, index).view(torch.uint8)

    def write(self, layer: int, block_ids: Sequence[int], heads: range, content: Tensor) -> None:
        """Write what `read` has returned, here or on another rank, into these blocks, which differ from each other."""
        view = self._view(layer)
        assert content.shape == self.shape(layer, len(block_ids), heads), "content has another shape than its blocks"
        index = torch.tensor(block_ids, device=view.device)
        self._cut(view, heads).index_copy_(1, index, content.view(view.dtype).to(view.device))

    def _view(self, layer: int) -> Tensor:
        return self._views[self.layers.index(layer)]

    def _cut(self, view: Tensor, heads: range) -> Tensor:
        return view.narrow(2, self.heads.index(heads.start), len(heads))


def _widest(num_bytes: int) -> torch.dtype:
    """Return the largest type whose elements fill so many bytes: indexing takes its time by elements."""
    types = torch.int64, torch.int32, torch.int16, torch.uint8
    return next(each for each in types if num_bytes % each.itemsize == 0)
