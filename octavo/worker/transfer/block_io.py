"""Reads and writes KV blocks as bytes, by layer and by heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.core.model_shape import (
    CacheGroup,
    Encoded,
    Indexed,
    IndexedLatent,
    Kept,
    KeysAndValues,
    Latent,
    Spaced,
    State,
)
from octavo.distributed.mesh import Mesh
from octavo.layers.heads import Heads

BehindSteps = Callable[[Callable[[], Tensor]], Tensor]
"""Runs work after the steps launched before, and returns its result when it is done; from any thread."""


class Place(NamedTuple):
    """A cache: that of a layer in a cache group, with the layer's number in the whole model."""

    layer: int
    group: int


def held_heads(keeps: Kept, mesh: Mesh) -> range:
    """Return the heads that a rank has of a layer's cache in the whole model.

    Latents are one head, which all ranks have, and so are spaced vectors. A state is one head for each rank, and so are
    keys that are chosen: only ranks with the same share of the layer have the same one.
    """
    match keeps:
        case KeysAndValues() | Encoded():
            first, count = Heads(1, keeps.kv_heads, 1).kv_share(mesh)
            return range(first, first + count)
        case State() | Indexed():
            return range(mesh.tensor.rank, mesh.tensor.rank + 1)
        case Latent() | IndexedLatent() | Spaced():
            return range(1)


class BlockIO:
    """The blocks of one rank. Layers and heads have their numbers in the whole model.

    In a block of any attention backend the heads follow each other, each with as many bytes: in the caches of the
    compiled kernels in one plane, in those of the reference one plane of keys and one of values. So some heads of some
    blocks are one tensor, uint8 [planes, blocks, heads, bytes of a head], independent of the number of ranks.
    """

    def __init__(
        self,
        caches: Sequence[Tensor],
        groups: Sequence[CacheGroup],
        heads: Sequence[range],
        layers: range,
        behind_steps: BehindSteps = lambda work: work(),
    ) -> None:
        """caches: blocks in dimension 1; of each layer one in each cache group that has it. groups: layers in them
        count from the first of this rank. heads: heads in the caches of each group. layers: the layers of this rank.
        behind_steps: runs work that reads or writes caches.
        """
        self._behind_steps = behind_steps
        self.layers = layers
        self.heads = heads
        self.groups = groups
        self.places = sorted(
            Place(layers.start + layer, number) for number, group in enumerate(groups) for layer in group.layers
        )
        self._views = {}
        for place, cache in zip(self.places, caches, strict=True):
            view = cache.view(*cache.shape[:2], len(heads[place.group]), -1).view(torch.uint8)
            self._views[place] = view.view(_widest(view.shape[3]))

    @property
    def num_groups(self) -> int:
        """Cache groups of the model."""
        return len(self.groups)

    def shape(self, place: Place, num_blocks: int, heads: range) -> tuple[int, ...]:
        """Return the shape of what `read` returns."""
        view = self._views[place]
        return view.shape[0], num_blocks, len(heads), view.shape[3] * view.element_size()

    def read(self, place: Place, block_ids: Sequence[int], heads: range) -> Tensor:
        """Return a copy on the host of these heads of these blocks, uint8 [planes, blocks, heads, bytes of a head]."""
        # block by block: index_select would first copy all blocks of a view that is not contiguous
        blocks = self._cut(place, heads)
        return self._behind_steps(
            lambda: torch.stack([blocks.select(1, block) for block in block_ids], 1).view(torch.uint8).cpu()
        )

    def write(self, place: Place, block_ids: Sequence[int], heads: range, content: Tensor) -> None:
        """Write the result of `read`, of this or another rank, into these blocks, which must be distinct."""
        view = self._views[place]
        assert content.shape == self.shape(place, len(block_ids), heads), "content has another shape than its blocks"
        blocks = self._cut(place, heads)

        def write() -> Tensor:
            index = torch.tensor(block_ids, device=view.device)
            return blocks.index_copy_(1, index, content.view(view.dtype).to(view.device))

        self._behind_steps(write)

    def _cut(self, place: Place, heads: range) -> Tensor:
        return self._views[place].narrow(2, self.heads[place.group].index(heads.start), len(heads))


def _widest(num_bytes: int) -> torch.dtype:
    """Return the largest type whose size divides this number of bytes: the time of indexing grows with the elements."""
    types = torch.int64, torch.int32, torch.int16, torch.uint8
    return next(each for each in types if num_bytes % each.itemsize == 0)
