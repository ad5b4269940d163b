"""Ranks in processes of their own, for tests of what reaches from one to another."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
from msgspec import structs

from octavo.core.process.rendezvous import Rendezvous
from octavo.distributed.groups import open_groups
from octavo.distributed.mesh import Mesh

_context = multiprocessing.get_context("forkserver")

Work = Callable[[Mesh], Any]


class RankProcesses:
    """Processes that carry out works, one after the other."""

    def __init__(self, size: int) -> None:
        # torch is imported once, in the process that these are forked from
        _context.set_forkserver_preload(["tests.distributed.works"])
        self._connections: list[Connection] = []
        self.processes: list[Any] = []
        for _ in range(size):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self.processes.append(process)

    def run(self, work: Work, *, tensor: int, pipeline: int = 1, kind: str, deadline_s: float = 30.0) -> list[Any]:
        """Return what `work` returns for each rank: the error that it raised, or that its process was lost."""
        backend = "gloo" if kind.startswith("process group") else None
        with rendezvous_of(kind, deadline_s) as rendezvous:
            connections = self._connections[: tensor * pipeline]
            for rank, connection in enumerate(connections):
                connection.send((work, rank, tensor, pipeline, rendezvous, os.getpid(), backend))
            return [_received(each) for each in connections]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self.processes:
            process.join(100)
            assert process.exitcode is not None, "a rank did not end"


@contextmanager
def rendezvous_of(kind: str, deadline_s: float) -> Iterator[Rendezvous]:
    """Make what the ranks of one mesh need to find each other, by `kind`: over TCP, else in shared memory."""
    if kind in ("gloo", "process group over TCP"):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        yield Rendezvous(port=port, deadline_s=deadline_s)
        return
    memory = os.memfd_create("octavo-test")
    try:
        yield Rendezvous(memory=memory, deadline_s=deadline_s)
    finally:
        os.close(memory)


def _received(connection: Connection) -> Any:
    try:
        assert connection.poll(60), "a rank does not come back"
        return connection.recv()
    except (EOFError, ConnectionResetError):
        return ProcessLookupError("the rank's process is lost")


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            work, rank, tensor, pipeline, rendezvous, owner, backend = connection.recv()
        except EOFError:
            return
        memory = rendezvous.memory
        if memory is not None:
            memory = os.open(f"/proc/{owner}/fd/{memory}", os.O_RDWR)
        place = Mesh.of_rank(rank, tensor=tensor, pipeline=pipeline)
        mesh = place
        try:
            mesh = open_groups(place, structs.replace(rendezvous, memory=memory), backend=backend)
            if memory is not None:
                os.close(memory)
            result = work(mesh)
        except Exception as error:
            result = type(error)(str(error))
        mesh.close()
        connection.send(result)
