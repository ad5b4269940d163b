"""Groups of ranks that reach each other by one process group of torch: NCCL between GPUs, gloo on CPUs.

The library is used for copies only: it would choose the order of additions by itself, so sums are made here.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store

from octavo.core.process.rendezvous import Rendezvous
from octavo.distributed.collectives import Collectives, bytes_of, summed
from octavo.distributed.mesh import Mesh
from octavo.distributed.overdue import LOOK_S, Event, OverdueWatch
from octavo.distributed.stores import gloo_options, memory_store, tcp_store
from octavo.errors import EngineDeadError

_ANSWER_S: Final = 1.0
"""Seconds after a deadline in which the other ranks can report that they wait, too."""

_MOST_SENDING: Final = 64
"""Most unfinished sends; a further one waits for the oldest."""

_MARGIN_S: Final = 60.0
"""Seconds by which the library's own timeout is longer than this group's deadline."""


@dataclass(frozen=True)
class Members:
    """The ranks of a group. ranks: their numbers in the mesh. own: index of this rank among them. store: a store of
    this group alone."""

    ranks: range
    own: int
    store: Store

    def absent(self) -> list[int]:
        """Report that this rank waits, and return the ranks that do not report the same within a second."""
        ends = time.monotonic() + _ANSWER_S
        try:
            self.store.set(f"waits {self.ranks[self.own]}", "")
            missing = [rank for rank in self.ranks if rank != self.ranks[self.own]]
            while missing and time.monotonic() < ends:
                missing = [rank for rank in missing if not self.store.check([f"waits {rank}"])]
                time.sleep(LOOK_S)
        except RuntimeError:  # the first rank of the mesh serves the store
            return [0]
        return missing


class ProcessGroup(Collectives):
    """Ranks over a process group of torch.

    On a GPU calls are launched, and the stream waits for them, not the host: a thread watches over the deadline. When
    it passes, and when the group is poisoned, the library's communicator is aborted, which ends calls that wait on the
    GPU; their results are invalid, and `check` raises.
    """

    def __init__(
        self, backend: Any, members: Members, deadline_s: float, make_watch: Callable[..., OverdueWatch] | None = None
    ) -> None:
        """make_watch: makes the watch over launched calls; None where the host waits for each call."""
        self.rank = members.own
        self.size = len(members.ranks)
        self._backend = backend
        self._members = members
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._sending: deque[tuple[Any, Tensor]] = deque()
        """Sends that may not have completed, with the tensors that they read."""
        self._watch = None if make_watch is None else make_watch(deadline_s, self._end_overdue)

    @property
    def is_recordable(self) -> bool:
        """Whether calls are launched on a stream, which a CUDA graph captures."""
        return self._watch is not None

    def gather(self, share: Tensor) -> Tensor:
        return torch.cat(tuple(self._exchange(share)), -1)

    def sum(self, partial: Tensor) -> Tensor:
        return summed(self._exchange(partial))

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        self.check()
        options = BroadcastOptions()
        options.rootRank = source
        self._finish(self._backend.broadcast([bytes_of(tensor)], options))

    def send(self, tensor: Tensor, target: int) -> None:
        self.check()
        sent = tensor.clone()
        while self._sending and (len(self._sending) >= _MOST_SENDING or self._sending[0][0].is_completed()):
            work, _ = self._sending.popleft()
            self._call(work.wait)  # gloo's works do not report completion before `wait`
        self._sending.append((self._backend.send([bytes_of(sent)], target, 0), sent))

    def receive(self, tensor: Tensor, source: int) -> None:
        self.check()
        work = self._backend.recv([bytes_of(tensor)], source, 0)
        if self._watch is None:
            # gloo closes the connection when a receiver stops waiting, so that it cannot check for poison
            self._call(lambda: work.wait(timedelta(seconds=self._deadline_s)))
        else:
            self._finish(work)

    def watch(self) -> None:
        if self._watch is not None:
            self._watch.note()

    def poison(self, reason: str) -> None:
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
        if self._watch is not None:
            self._watch.close()
            # idle communicators too: an orderly end needs all ranks
            self._backend.abort()

    def close(self) -> None:
        if self._watch is None and self._reason is None:
            for work, _ in self._sending:  # an unfinished send of gloo would be lost with its tensor
                with suppress(RuntimeError):
                    work.wait(timedelta(seconds=_ANSWER_S))
        self.poison("the group of ranks is closed")
        self._sending.clear()

    def meet(self, example: Tensor, *, is_row: bool) -> None:
        """Make the connections that calls need, before memory is planned, and wait for the other ranks.

        example: one element in the memory of the tensors to come. is_row: whether ranks send to their neighbours; else
        they gather. Raises EngineDeadError.
        """
        try:
            if is_row:
                if self.rank:
                    self.receive(example, self.rank - 1)
                if self.rank + 1 < self.size:
                    self.send(example, self.rank + 1)
            else:
                example = self.gather(example)
            example.tolist()
        except RuntimeError as error:
            self.check()
            self._fail(f"the ranks cannot reach each other: {error}")
        self.check()

    def _exchange(self, share: Tensor) -> Tensor:
        """Return the tensors of all ranks, which have one shape and type, [ranks, ...]."""
        self.check()
        share = share.contiguous()
        shares = share.new_empty((self.size, *share.shape))
        self._finish(self._backend._allgather_base(bytes_of(shares), bytes_of(share)))
        return shares

    def _finish(self, work: Any) -> None:
        """Let the stream wait for a call on a GPU; elsewhere wait for it until the deadline."""
        if self._watch is not None:
            work.wait()
            self._watch.note()
            return
        ends = time.monotonic() + self._deadline_s
        while not work.is_completed():
            # raised on the timeout, and again below if the call has failed
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=LOOK_S))
            self.check()
            if time.monotonic() > ends:
                self._fail(self._named(f"did not end within {self._deadline_s:g} s"))
        self._call(work.wait)

    def _call(self, wait: Callable[[], object]) -> None:
        """Wait for the library. Raises EngineDeadError where it fails."""
        try:
            wait()
        except RuntimeError as error:
            self.check()
            self._fail(f"a rank of {list(self._members.ranks)} cannot be reached: {error}")

    def _end_overdue(self, what: str) -> None:
        self.poison(self._named(what))

    def _named(self, what: str) -> str:
        absent = self._members.absent()
        if absent:
            return f"rank {', '.join(map(str, absent))} did not come: a call {what}"
        return f"a call of ranks {list(self._members.ranks)} {what}, and all wait"


class ProcessGroups:
    """Opens the process groups of a mesh."""

    def __init__(self, place: Mesh, rendezvous: Rendezvous, backend: str) -> None:
        """backend: "nccl" or "gloo". Raises EngineDeadError when the first rank is not reached by the deadline."""
        self._place, self._rendezvous, self._name = place, rendezvous, backend
        self._is_local = rendezvous.shares_memory(range(place.size))
        self._store = memory_store(rendezvous, place.size) if self._is_local else tcp_store(place, rendezvous)

    def open(self, ranks: range, example: Tensor) -> ProcessGroup:
        """Return the group of `ranks`, which can reach each other. example: one element, where tensors are.

        Raises EngineDeadError for ranks that do not join before the deadline.
        """
        if example.is_cuda:
            torch.cuda.set_device(example.device)  # each thread has its own
        store = PrefixStore(f"{ranks.start} {ranks.step}", self._store)
        members = Members(ranks, ranks.index(self._place.rank), store)
        is_gloo = self._name == "gloo"
        try:
            backend = self._gloo(members) if is_gloo else self._nccl(members)
        except RuntimeError as error:
            names = ", ".join(map(str, members.absent())) or str(list(ranks))
            raise EngineDeadError(
                f"rank {names} did not come within {self._rendezvous.deadline_s:g} s: {error}"
            ) from error
        group = ProcessGroup(backend, members, self._rendezvous.deadline_s, None if is_gloo else _watch)
        group.meet(example, is_row=ranks == self._place.column_ranks)
        return group

    def _gloo(self, members: Members) -> Any:
        options = gloo_options(self._rendezvous, is_local=self._is_local)
        return ProcessGroupGloo(members.store, members.own, len(members.ranks), options)

    def _nccl(self, members: Members) -> Any:
        from torch._C import _distributed_c10d as library

        nccl: Any = library.ProcessGroupNCCL  # only where torch is built with it
        options = nccl.Options()
        options._timeout = timedelta(seconds=self._rendezvous.deadline_s + _MARGIN_S)
        return nccl(members.store, members.own, len(members.ranks), options)


def _watch(deadline_s: float, on_overdue: Callable[[str], None]) -> OverdueWatch:
    """Return the watch over the calls on the current GPU."""
    event: Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    return OverdueWatch(event, deadline_s, on_overdue, torch.cuda.is_current_stream_capturing)
