"""Opens the groups of a mesh's ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from octavo.core.process.rendezvous import Rendezvous
from octavo.distributed.collectives import Collectives
from octavo.distributed.mesh import Mesh

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Returns an uninitialised dense tensor."""


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


Meet = Callable[[Callable[[], Collectives]], Collectives]
"""Opens a group, which waits for other ranks."""


def open_groups(
    place: Mesh,
    rendezvous: Rendezvous,
    allocate: Allocate = _empty,
    backend: str | None = None,
    meet: Meet | None = None,
) -> Mesh:
    """Return `place` with its groups. Every rank calls this; it waits for those that are reached over TCP or by NCCL.

    `allocate` makes the tensors that gathers return. backend: that of torch's process groups by which devices with
    their own memory reach each other; None where tensors are in the memory of the host. meet: calls the function that
    opens a group and waits, perhaps in a thread of its own. Raises EngineDeadError when a rank does not join before the
    deadline.
    """

    @cache
    def shared() -> _Opener:
        from octavo.distributed.shared_memory import SharedMemory

        return SharedMemory(place, rendezvous, allocate).open

    @cache
    def remote() -> _Opener:
        if backend is None:
            from octavo.distributed.gloo import GlooStore

            return GlooStore(place, rendezvous).open
        from octavo.distributed.process_group import ProcessGroups

        groups, example = ProcessGroups(place, rendezvous, backend), allocate((1,), torch.float32).zero_()
        return lambda ranks: groups.open(ranks, example)

    def group(ranks: range) -> Collectives:
        if len(ranks) == 1:
            return Collectives()
        if backend is None and rendezvous.shares_memory(ranks):
            return shared()(ranks)
        opener = remote()
        return opener(ranks) if meet is None else meet(lambda: opener(ranks))

    return replace(place, tensor_group=group(place.stage_ranks), stage_group=group(place.column_ranks))


_Opener = Callable[[range], Collectives]
"""Returns the group of some ranks of the mesh, this one among them."""
