"""Starts the ranks of a model in processes of this machine, each on processors of its own."""

from __future__ import annotations

import dataclasses
import logging
import os
import selectors
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from octavo.core.process import frames, processes
from octavo.core.process.authentication import read_secret
from octavo.core.process.processes import Process
from octavo.core.process.rendezvous import Rendezvous
from octavo.executor.channel import ORPHANED, Here, Start
from octavo.executor.cluster import Gathering, Join, connect
from octavo.executor.executor import OnNote, OpenWorker, open_rank
from octavo.executor.multiprocess import MultiprocessExecutor, Rank
from octavo.platform import core_shares

if TYPE_CHECKING:
    from octavo.config.schema import EngineConfig

RANK_MODULE: Final = "octavo.executor.rank_process"

_log = logging.getLogger(__name__)


def gather_ranks(config: EngineConfig) -> list[Rank]:
    """Wait for the ranks of the other machines. Raises ConfigError or EngineDeadError."""
    device = config.device
    num_here = device.num_ranks // device.nnodes
    secret = read_secret(device.cluster_secret_file)
    gathering = Gathering(device.master_addr, device.master_port, secret, num_here, range(1, device.nnodes))
    return gathering.wait(device.distributed_timeout_seconds)


def start_ranks(
    config: EngineConfig,
    on_death: Callable[[str], None] | None = None,
    on_note: OnNote | None = None,
    *,
    module: str = RANK_MODULE,
    open_worker: OpenWorker = open_rank,
    gather: Callable[[EngineConfig], list[Rank]] = gather_ranks,
    resources: ExitStack | None = None,
    gpus: Sequence[str] = (),
) -> MultiprocessExecutor:
    """Return the executor of all ranks, their models opened but not loaded.

    on_death, on_note: as in `make_executor`. module: what runs in the processes of this machine; open_worker: what
    opens the worker of rank 0. gather: returns the ranks of other machines. resources: what is released at the end.
    gpus: as in `Start`; that of this process is its caller's matter.
    Raises ConfigError or CheckpointError, and EngineDeadError for ranks of other machines that do not come.
    """
    from octavo.worker.start.identity import Identity

    device = config.device
    num_ranks = device.num_ranks
    num_here = num_ranks // device.nnodes
    timeout_s = device.distributed_timeout_seconds
    config = config_of_rank(config)
    _keep_processes()
    shares = core_shares(num_here)
    elsewhere = gather(config) if device.nnodes > 1 else []
    memory = os.memfd_create("octavo-ranks")
    resources = resources or ExitStack()
    resources.callback(os.close, memory)
    # by its number: another thread may collect the engine
    resources.callback(_set_processors, threading.get_native_id(), os.sched_getaffinity(0))
    here = [Rank(rank, *spawn_rank(module, shares[rank], memory)) for rank in range(1, num_here)]
    executor = MultiprocessExecutor(
        [*here, *elsewhere],
        result_rank=num_ranks - device.tensor_parallel_size,
        timeout_s=timeout_s,
        on_death=on_death,
        on_note=on_note,
        on_shutdown=resources.close,
    )
    rendezvous = Rendezvous(
        memory=memory,
        shared_ranks=(0, num_here),
        address=device.master_addr,
        port=device.master_port + 1,
        deadline_s=timeout_s,
    )
    try:
        os.sched_setaffinity(0, shares[0])  # of this thread, and of those that it starts
        encoded = msgspec.Raw(frames.encode(config))
        start = Start(identity=Identity.of(config), config=encoded, rendezvous=rendezvous, gpus=list(gpus))
        notify = None if on_note is None else partial(on_note, 0)
        executor.start(start, lambda: open_worker(config, 0, rendezvous, notify, executor.meet))
    except BaseException:
        executor.shutdown()
        raise
    return executor


def serve_node(
    address: str,
    port: int,
    secret: bytes,
    *,
    node: int,
    timeout_s: float,
    model_path: str | None = None,
    module: str = RANK_MODULE,
) -> bool:
    """Join the engine at an address with the ranks of this machine, which is number `node`, and wait for their end.

    Returns whether they may join again: whether the engine or one of them has ended otherwise than by Shutdown. Raises
    ConfigError or EngineDeadError when they cannot join.
    """
    connections, index, count = [], 0, 1
    try:
        while index < count:
            connection, joined = connect(address, port, secret, Join(node, index), timeout_s)
            connections.append(connection)
            index, count, first = index + 1, joined.ranks_per_node, joined.rank - index
        names = f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1}"
        _log.info("joined %s:%d as %s", address, port, names)
        _keep_processes()
        shares = core_shares(count)
        if (num_processors := len(set().union(*shares))) < count:
            _log.warning("%s take turns on %d processor%s", names, num_processors, "s" * (num_processors > 1))
        memory = os.memfd_create("octavo-ranks")
        ranks: list[Rank] = []
        for connection, share in zip(connections, shares, strict=True):
            here = Here(connection.fileno(), memory, (first, count), model_path)
            ranks.append(Rank(first + len(ranks), *spawn_rank(module, share, memory, here)))
        os.close(memory)
    finally:
        for connection in connections:
            connection.close()
    try:
        codes = _exit_codes(ranks, timeout_s)
    finally:
        for rank in ranks:
            rank.connection.close()
    for rank, code in zip(ranks, codes, strict=True):
        if code not in (0, ORPHANED):
            _log.error("%s", rank.how_it_ended())
    return any(codes)


def _exit_codes(ranks: Sequence[Rank], timeout_s: float) -> list[int]:
    """Wait for the ends of processes. One that is stopped is killed after `timeout_s`, when the engine has given it up,
    or up to as long again."""
    stopped: list[Rank] = []
    with selectors.DefaultSelector() as running:
        for rank in ranks:
            running.register(rank.connection, selectors.EVENT_READ, rank)  # readable at the end of the process
        while running.get_map():
            ended = running.select(timeout_s)
            for key, _ in ended:
                running.unregister(key.fileobj)
            if ended:
                continue
            for rank in stopped:
                if rank.is_stopped and rank.process is not None:
                    rank.process.kill()
            stopped = [rank for rank in ranks if rank.is_stopped]
    return [rank.process.wait() for rank in ranks if rank.process is not None]


def spawn_rank(
    module: str, processors: Sequence[int], memory: int, here: Here | None = None
) -> tuple[socket.socket, Process]:
    """Start the process of a rank on its processors. memory: the descriptor that ranks of this machine share."""
    arguments = () if here is None else (msgspec.json.encode(here).decode(),)
    inherited = [memory] if here is None else [memory, here.channel]
    connection, process = processes.spawn(module, arguments, inherited)
    os.sched_setaffinity(process.pid, processors)  # before it starts a thread
    return connection, process


def _keep_processes() -> None:
    """Tell torch not to end this process, and those that it starts, when NCCL fails: the engine reports the error.

    There is no other switch for it. A value that the user has set stays.
    """
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")


def _set_processors(thread: int, processors: set[int]) -> None:
    with suppress(ProcessLookupError):  # it may have ended
        os.sched_setaffinity(thread, processors)


def config_of_rank(config: EngineConfig) -> EngineConfig:
    """Return the configuration with the share of the threads that one of the ranks of a machine has."""
    device = config.device
    device = dataclasses.replace(device, threads=max(1, device.threads // device.ranks_per_machine))
    return msgspec.structs.replace(config, device=device)
