"""Starts the ranks of a model in processes of this machine, each on processors of its own."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from octavo.core import frames, processes
from octavo.executor.channel import Start
from octavo.executor.executor import RankWorker, open_rank
from octavo.executor.multiprocess import MultiprocessExecutor, Rank
from octavo.platform import core_shares

if TYPE_CHECKING:
    from octavo.config.schema import EngineConfig

RANK_MODULE: Final = "octavo.executor.rank_process"

OpenWorker = Callable[["EngineConfig", int, msgspec.Raw], RankWorker]
"""Opens the worker of a rank: its configuration, its number, where its groups meet."""

_log = logging.getLogger(__name__)


def start_ranks(
    config: EngineConfig,
    on_death: Callable[[str], None] | None = None,
    *,
    module: str = RANK_MODULE,
    open_worker: OpenWorker = open_rank,
) -> MultiprocessExecutor:
    """Return the executor of all ranks, their models opened but not loaded. Raises ConfigError or CheckpointError.

    on_death: as in `make_executor`. module: what runs in the processes; open_worker: what opens the worker of rank 0.
    """
    from octavo.worker.identity import Identity

    device = config.device
    num_ranks = device.tensor_parallel_size * device.pipeline_parallel_size
    shares = divide_processors(num_ranks)
    config = config_of_rank(config, num_ranks)
    rendezvous = msgspec.Raw(b"\xc0")
    affinity = os.sched_getaffinity(0)
    ranks = spawn_ranks(range(1, num_ranks), shares[1:], module)
    executor = MultiprocessExecutor(
        ranks,
        result_rank=num_ranks - device.tensor_parallel_size,
        timeout_s=device.distributed_timeout_seconds,
        on_death=on_death,
        on_shutdown=lambda: os.sched_setaffinity(0, affinity),
    )
    try:
        os.sched_setaffinity(0, shares[0])  # of this thread, and of those that it starts
        identity, encoded = Identity.of(config), msgspec.Raw(frames.encode(config))
        messages = [
            Start(
                identity=identity,
                rank=rank.number,
                sends_results=0 < executor.result_rank == rank.number,
                config=encoded,
                rendezvous=rendezvous,
            )
            for rank in ranks
        ]
        executor.start(messages, lambda: open_worker(config, 0, rendezvous))
    except BaseException:
        executor.shutdown()
        raise
    return executor


def spawn_ranks(numbers: Sequence[int], shares: Sequence[list[int]], module: str = RANK_MODULE) -> list[Rank]:
    """Start the processes of these ranks, each on its share of the processors."""
    ranks = []
    for number, share in zip(numbers, shares, strict=True):
        connection, process = processes.spawn(module)
        os.sched_setaffinity(process.pid, share)  # before it starts a thread
        ranks.append(Rank(number, connection, process))
    return ranks


def divide_processors(num_ranks: int) -> list[list[int]]:
    """Return the processors of each rank on this machine; log a warning when there are too few."""
    shares = core_shares(num_ranks)
    num_processors = len(set().union(*shares))
    if num_processors < num_ranks:
        _log.warning(
            "%d ranks share %d processors, so that they wait for each other; use fewer ranks or more machines",
            num_ranks,
            num_processors,
        )
    return shares


def config_of_rank(config: EngineConfig, num_ranks: int) -> EngineConfig:
    """Return the configuration with the share of the threads that one of `num_ranks` ranks of a machine has."""
    device = dataclasses.replace(config.device, threads=max(1, config.device.threads // num_ranks))
    return msgspec.structs.replace(config, device=device)
