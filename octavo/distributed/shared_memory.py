"""Groups of ranks on one machine, by compiled calls that compute through shared memory."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from octavo import _native
from octavo.core.process.rendezvous import Rendezvous
from octavo.distributed.collectives import Collectives
from octavo.distributed.groups import Allocate
from octavo.distributed.mesh import Mesh
from octavo.errors import EngineDeadError

SPIN_S: Final = 100e-6
"""Seconds for which a rank with a processor of its own spins before it sleeps: kernels of ranks differ by less."""

_SUM_TYPES: Final[Mapping[torch.dtype, int]] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The compiled library's numbers for the element types of sums."""


class SharedMemoryGroup(Collectives):
    """Ranks over memory that all ranks have mapped. The calls are recordable."""

    def __init__(self, native: _native.SharedGroup, rank: int, size: int, allocate: Allocate) -> None:
        self.rank = rank
        self.size = size
        self._native: _native.SharedGroup | None = native
        self._allocate = allocate

    def gather(self, share: Tensor) -> Tensor:
        shape = share.shape
        width = shape[-1]
        out = self._allocate((*shape[:-1], width * self.size), share.dtype)
        if len(shape) == 2 and share.stride(1) == 1:
            rows, stride = shape[0], share.stride(0)
        else:
            share, rows, stride = share.contiguous(), math.prod(shape[:-1]), width
        bytes_each = share.element_size()
        self._living().gather(share.data_ptr(), stride * bytes_each, out.data_ptr(), rows, width * bytes_each)
        return out

    def sum(self, partial: Tensor) -> Tensor:
        partial = partial.contiguous()
        self._living().sum(partial.data_ptr(), partial.numel(), _SUM_TYPES[partial.dtype])
        return partial

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        self._living().broadcast(*_bytes_of(tensor), source)

    def send(self, tensor: Tensor, target: int) -> None:
        self._living().send(*_bytes_of(tensor), target)

    def receive(self, tensor: Tensor, source: int) -> None:
        self._living().receive(*_bytes_of(tensor), source)

    def poison(self, reason: str) -> None:
        """Poison every rank that shares the memory, also those of other groups, within 50 ms."""
        native, self._reason = self._native, reason
        if native is not None:
            native.poison(reason)

    def close(self) -> None:
        """Release this group; the memory is unmapped when no recording refers to it any more."""
        self._native = None

    def _living(self) -> _native.SharedGroup:
        if self._native is None:
            raise EngineDeadError("the group of ranks is closed")
        return self._native


class SharedMemory:
    """The memory of a mesh: a head, then the tensor group of each stage, then the stage group of each place in them."""

    def __init__(self, place: Mesh, rendezvous: Rendezvous, allocate: Allocate) -> None:
        """Set the size of the memory, which follows from the mesh; every rank sets the same one."""
        assert rendezvous.memory is not None
        self._place, self._descriptor, self._allocate = place, rendezvous.memory, allocate
        self._deadline_s = rendezvous.deadline_s
        self._spin_s = SPIN_S if place.size <= (os.cpu_count() or 1) else 0.0
        native, tensor, stages = _native.SharedGroup, place.tensor.size, place.pipeline.size
        self._tensor_bytes, self._stage_bytes = native.group_bytes(tensor), native.group_bytes(stages)
        self._stages_begin = native.head_bytes() + stages * self._tensor_bytes
        self._num_bytes = self._stages_begin + tensor * self._stage_bytes
        os.ftruncate(self._descriptor, self._num_bytes)

    def open(self, ranks: range) -> SharedMemoryGroup:
        """Return the group of `ranks`: those of this rank's stage, or those with its place in their stages."""
        place = self._place
        if ranks == place.stage_ranks:
            offset = _native.SharedGroup.head_bytes() + place.pipeline.rank * self._tensor_bytes
        else:
            offset = self._stages_begin + place.tensor.rank * self._stage_bytes
        rank, size = ranks.index(place.rank), len(ranks)
        native = _native.SharedGroup(
            self._descriptor, self._num_bytes, offset, rank, size, ranks[0], ranks.step, self._deadline_s, self._spin_s
        )
        return SharedMemoryGroup(native, rank, size, self._allocate)


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    assert tensor.is_contiguous(), "the tensor is written in place, as one piece"
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()
