"""Ranks in threads of one process, for tests of what several ranks compute."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from queue import Empty, Queue
from typing import TypeVar

import torch
from torch import Tensor

from octavo.distributed.collectives import Collectives
from octavo.distributed.groups import Allocate, open_groups
from octavo.distributed.mesh import Mesh
from octavo.errors import EngineDeadError
from tests.distributed.processes import rendezvous_of

T = TypeVar("T")

DEADLINE_S = 30.0


@dataclass
class _Shared:
    """What the ranks of one group have in common. `deadline_s` limits each wait."""

    size: int
    deadline_s: float = DEADLINE_S
    reason: str | None = None
    tensors: dict[int, Tensor] = field(default_factory=dict)
    queues: dict[tuple[int, int], Queue[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size)
        self.queues = {(a, b): Queue() for a in range(self.size) for b in range(self.size)}


class ThreadCollectives(Collectives):
    """Those of one thread."""

    is_recordable = False

    def __init__(self, rank: int, shared: _Shared) -> None:
        self.rank, self.size = rank, shared.size
        self._shared = shared

    def gather(self, share: Tensor) -> Tensor:
        return torch.cat(self._exchange(share), -1)

    def sum(self, partial: Tensor) -> Tensor:
        tensors = self._exchange(partial)
        total = tensors[0].float()
        for each in tensors[1:]:
            total = total + each.float()
        return total.to(partial.dtype)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        tensor.copy_(self._exchange(tensor)[source])

    def send(self, tensor: Tensor, target: int) -> None:
        self.check()
        self._shared.queues[self.rank, target].put(tensor.clone())

    def receive(self, tensor: Tensor, source: int) -> None:
        waited = 0.0
        while waited < self._shared.deadline_s:
            self.check()
            try:
                received = self._shared.queues[source, self.rank].get(timeout=0.05)
            except Empty:
                waited += 0.05
                continue
            assert (received.shape, received.dtype) == (tensor.shape, tensor.dtype)
            tensor.copy_(received)
            return
        raise EngineDeadError(f"rank {source} of {self.size} sent nothing within {self._shared.deadline_s:g} s")

    def poison(self, reason: str) -> None:
        self._shared.reason = self._shared.reason or reason
        self._shared.barrier.abort()

    def check(self) -> None:
        if self._shared.reason is not None:
            raise EngineDeadError(self._shared.reason)

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        """Return copies of the tensors of all ranks."""
        shared = self._shared
        self.check()
        shared.tensors[self.rank] = tensor
        self._meet()
        copies = [shared.tensors[rank].clone() for rank in range(shared.size)]
        self._meet()
        shared.tensors.pop(self.rank)
        return copies

    def _meet(self) -> None:
        shared = self._shared
        try:
            shared.barrier.wait(shared.deadline_s)
        except threading.BrokenBarrierError:
            self.check()
            missing = [rank for rank in range(shared.size) if rank not in shared.tensors]
            raise EngineDeadError(
                f"rank {missing[0] if missing else '?'} of {shared.size} did not come within {shared.deadline_s:g} s"
            ) from None


def thread_meshes(
    tensor: int, pipeline: int = 1, deadline_s: float = DEADLINE_S, *, whole_experts: bool = False
) -> list[Mesh]:
    """Return the meshes of all ranks, in rank order."""
    stages = [_Shared(tensor, deadline_s) for _ in range(pipeline)]
    columns = [_Shared(pipeline, deadline_s) for _ in range(tensor)]
    sizes = {"tensor": tensor, "pipeline": pipeline}
    places = [Mesh.of_rank(rank, **sizes, whole_experts=whole_experts) for rank in range(tensor * pipeline)]
    return [
        replace(
            place,
            tensor_group=ThreadCollectives(place.tensor.rank, stages[place.pipeline.rank]),
            stage_group=ThreadCollectives(place.pipeline.rank, columns[place.tensor.rank]),
        )
        for place in places
    ]


def memory_meshes(tensor: int, pipeline: int = 1, allocate: Sequence[Allocate] = ()) -> list[Mesh]:
    """Return the meshes of all ranks, which share memory as ranks in processes do. allocate: one for each rank."""
    places = [Mesh.of_rank(rank, tensor=tensor, pipeline=pipeline) for rank in range(tensor * pipeline)]
    with rendezvous_of("shared memory", DEADLINE_S) as rendezvous:
        return [open_groups(place, rendezvous, *allocate[place.rank : place.rank + 1]) for place in places]


def run_on(meshes: list[Mesh], work: Callable[[Mesh], T]) -> list[T]:
    """Return what `work` returns for each mesh, each in a thread of its own.

    Raises the first error that is no consequence of another: the ranks beside one that failed are poisoned.
    """

    def guarded(mesh: Mesh) -> T:
        try:
            return work(mesh)
        except BaseException as error:
            mesh.poison(f"a rank failed: {type(error).__name__}: {error}")
            raise

    with ThreadPoolExecutor(len(meshes)) as pool:
        futures = [pool.submit(guarded, mesh) for mesh in meshes]
        errors = [error for future in futures if (error := future.exception()) is not None]
    causes = [error for error in errors if not str(error).startswith("a rank failed: ")]
    if errors:
        raise (causes or errors)[0]
    return [future.result() for future in futures]


def run_ranks(size: int, work: Callable[[Mesh], T], *, pipeline: int = 1) -> list[T]:
    """Return what `work` returns for `size` tensor ranks in each of `pipeline` stages, in rank order."""
    return run_on(thread_meshes(size, pipeline), work)
