"""Stores in which the process groups of a mesh find each other."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import FileStore, ProcessGroupGloo, Store, TCPStore

from octavo.core.process.listening import own_address
from octavo.core.process.rendezvous import Rendezvous
from octavo.distributed.mesh import Mesh
from octavo.errors import EngineDeadError


def tcp_store(place: Mesh, rendezvous: Rendezvous) -> Store:
    """Return the store that the first rank serves. Raises EngineDeadError when it is not reached by the deadline."""
    try:
        return TCPStore(
            rendezvous.address,
            rendezvous.port,
            is_master=place.rank == 0,
            timeout=timedelta(seconds=rendezvous.deadline_s),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        where = f"{rendezvous.address}:{rendezvous.port}"
        raise EngineDeadError(f"rank 0 cannot be reached at {where}: {error}") from error


def memory_store(rendezvous: Rendezvous, num_ranks: int) -> Store:
    """Return a store in the memory that all ranks of one machine have inherited: it needs no port.

    The descriptor of the rendezvous may be closed meanwhile. A copy of it stays open as long as the process: the
    library opens the file again when the last of its own references goes, and by then a number that was closed could
    be another file's.
    """
    assert rendezvous.memory is not None
    store = FileStore(f"/proc/self/fd/{os.dup(rendezvous.memory)}", num_ranks)
    store.set_timeout(timedelta(seconds=rendezvous.deadline_s))
    return store


def gloo_options(rendezvous: Rendezvous, *, is_local: bool = False) -> Any:
    """Return options of gloo's groups. is_local: whether all ranks are on this machine."""
    options_class: Any = ProcessGroupGloo
    options = options_class._Options()
    options._timeout = timedelta(seconds=rendezvous.deadline_s)
    options._threads = 1
    own = "127.0.0.1" if is_local else rendezvous.host or own_address(rendezvous.address)
    options._devices = [ProcessGroupGloo.create_device(hostname=own)]
    return options
