"""Groups of ranks that reach each other over TCP, by torch's process groups of two ranks each.

Every call is made of copies from one rank to another, so that a rank that does not join is known by its number, and
sums are made here, in the order of ranks: gloo's own sums depend on the place of a row in the tensor. The copies of a
call run concurrently: a gather of 4 MB takes half of the time that gloo's own takes over TCP, with 2 to 4 ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo

from octavo.core.process.rendezvous import Rendezvous
from octavo.distributed.collectives import Collectives, bytes_of, summed
from octavo.distributed.mesh import Mesh
from octavo.distributed.stores import gloo_options, tcp_store
from octavo.errors import EngineDeadError

_LOOK_S: Final = 0.05
"""Seconds between two checks of a waiting rank whether it is poisoned."""


_Paths = Sequence[Any]


class GlooGroup(Collectives):
    """Ranks over TCP. Poison reaches the calls of this rank; those of the others fail when its group closes."""

    is_recordable = False

    def __init__(self, rank: int, ranks: range, outward: _Paths, inward: _Paths, deadline_s: float) -> None:
        """ranks: their numbers in the mesh. outward, inward: process groups to and from each rank, None for this rank
        itself."""
        self.rank = rank
        self.size = len(ranks)
        self._ranks = ranks
        self._outward = outward
        self._inward = inward
        self._deadline_s = deadline_s
        self._sending: list[tuple[Any, Tensor]] = []
        """Sends that may not have completed, with the tensors that they read."""

    def gather(self, share: Tensor) -> Tensor:
        return torch.cat(self._exchange(share), -1)

    def sum(self, partial: Tensor) -> Tensor:
        return summed(self._exchange(partial))

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        if source != self.rank:
            self.receive(tensor, source)
            return
        others = [rank for rank in range(self.size) if rank != source]
        self._finish([(rank, self._copy(self._outward, rank, tensor)) for rank in others], "receive")

    def send(self, tensor: Tensor, target: int) -> None:
        sent = tensor.clone()
        self._sending = [(work, each) for work, each in self._sending if not work.is_completed()]
        self._sending.append((self._copy(self._outward, target, sent), sent))

    def receive(self, tensor: Tensor, source: int) -> None:
        self._finish([(source, self._copy(self._inward, source, tensor))], "send")

    def close(self) -> None:
        self.poison("the group of ranks is closed")
        self._outward, self._inward, self._sending = (), (), []

    def _copy(self, paths: _Paths, rank: int, tensor: Tensor) -> Any:
        """Begin to copy `tensor` over the path to or from a rank."""
        self.check()
        return paths[rank].broadcast([bytes_of(tensor)], BroadcastOptions())

    def _exchange(self, share: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have one shape and type."""
        share = share.contiguous()
        shares = [share if rank == self.rank else torch.empty_like(share) for rank in range(self.size)]
        others = [rank for rank in range(self.size) if rank != self.rank]
        works = [(rank, self._copy(self._inward, rank, shares[rank])) for rank in others]
        works += [(rank, self._copy(self._outward, rank, share)) for rank in others]
        self._finish(works, "gather")
        return shares

    def _finish(self, works: Sequence[tuple[int, Any]], what: str) -> None:
        """Wait for copies from or to other ranks until the deadline."""
        ends = time.monotonic() + self._deadline_s
        for rank, work in works:
            while not self._is_finished(rank, work):
                if time.monotonic() > ends:
                    self._fail(f"rank {self._ranks[rank]} did not {what} within {self._deadline_s:g} s")

    def _is_finished(self, rank: int, work: Any) -> bool:
        """Wait for a copy until the next poison check is due; return whether it has ended."""
        self.check()
        # raised on the timeout, and again below if the copy has failed
        with suppress(RuntimeError):
            work.wait(timedelta(seconds=_LOOK_S))
        if not work.is_completed():
            return False
        try:
            work.wait()
        except RuntimeError as error:
            self._fail(f"rank {self._ranks[rank]} cannot be reached: {error}")
        return True


class GlooStore:
    """Where the ranks of a mesh find each other's addresses: a store that the first rank serves."""

    def __init__(self, place: Mesh, rendezvous: Rendezvous) -> None:
        """Raises EngineDeadError when the first rank is not reached before the deadline."""
        self._rank = place.rank
        self._deadline_s = rendezvous.deadline_s
        self._options = gloo_options(rendezvous)
        self._store = tcp_store(place, rendezvous)

    def open(self, ranks: range) -> GlooGroup:
        """Return the group of `ranks`. Raises EngineDeadError, naming a rank that does not join before the deadline."""
        outward: list[Any] = [None] * len(ranks)
        inward: list[Any] = [None] * len(ranks)
        for index, other in enumerate(ranks):
            # both ranks open their two paths in the same order
            for source, target in sorted(((self._rank, other), (other, self._rank))):
                if source != target:
                    (outward if source == self._rank else inward)[index] = self._path(source, target)
        return GlooGroup(ranks.index(self._rank), ranks, outward, inward, self._deadline_s)

    def _path(self, source: int, target: int) -> ProcessGroupGloo:
        store = PrefixStore(f"{source}-{target}", self._store)
        try:
            return ProcessGroupGloo(store, int(self._rank == target), 2, self._options)
        except RuntimeError as error:
            other = source + target - self._rank
            raise EngineDeadError(f"rank {other} did not come within {self._deadline_s:g} s: {error}") from error
