"""Microseconds of a sum and of a gather over ranks of this machine: `python -m benchmarks.collectives`.

Ours through shared memory and over TCP, gloo's own all-reduce and all-gather, and those of an MPI where `--mpi` names a
virtual environment with one (`python -m venv DIR; DIR/bin/pip install mpich mpi4py numpy`). They take turns, round by
round, each rank on a processor of its own. A size is that of the result, in float32, on every rank; times are those of
rank 0 with the call from Python. Recorded calls are made again without Python.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from benchmarks.mpi_rank import seconds
from octavo.cli.report import report
from octavo.core.process.rendezvous import Rendezvous
from octavo.devices.cpu.runtime import CpuRuntime
from octavo.distributed.groups import open_groups
from octavo.distributed.mesh import Mesh

Times = dict[str, dict[int, list[float]]]
"""Seconds of each call, by collective and by size in bytes."""

BATCH = 100
"""Calls of a recording, which are timed together."""


def shared_memory(rank: int, ranks: int, memory: int, port: int) -> dict[str, Callable[..., Any]]:
    group = open_groups(Mesh.of_rank(rank, tensor=ranks), Rendezvous(memory=memory), CpuRuntime.open().empty)
    return {"sum": group.sum, "gather": group.gather}


def tcp(rank: int, ranks: int, memory: int, port: int) -> dict[str, Callable[..., Any]]:
    group = open_groups(Mesh.of_rank(rank, tensor=ranks), Rendezvous(port=port))
    return {"sum": group.sum, "gather": group.gather}


def gloo(rank: int, ranks: int, memory: int, port: int) -> dict[str, Callable[..., Any]]:
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)

    def gather(share: torch.Tensor) -> None:
        out = [torch.empty_like(share) for _ in range(ranks)]
        torch.distributed.all_gather(out, share)

    return {"sum": torch.distributed.all_reduce, "gather": gather}


KINDS = {"shared memory": shared_memory, "tcp": tcp, "gloo": gloo}


def run_rank(kind: str, rank: int, ranks: int, places: tuple[int, int], work: tuple[int, list[int]], out: Any) -> None:
    """Measure in one rank; rank 0 puts the times in the queue `out`. places: the memory and the port to meet at."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {processors[rank % len(processors)]})
    calls = KINDS[kind](rank, ranks, *places)
    repetitions, sizes = work
    times: Times = {name: {} for name in calls}
    for size in sizes:
        inputs = {"sum": torch.zeros(1, size // 4), "gather": torch.zeros(1, size // 4 // ranks)}
        for name, call in calls.items():
            times[name][size] = seconds(partial(call, inputs[name]), repetitions)
            if kind == "shared memory":
                times.setdefault(f"{name} recorded", {})[size] = recorded(call, inputs[name], repetitions)
    if rank == 0:
        out.put(times)


def recorded(call: Callable[..., Any], tensor: torch.Tensor, repetitions: int) -> list[float]:
    """Return the seconds of a call in a recording."""
    runtime = CpuRuntime.open()

    def compute() -> torch.Tensor:
        for _ in range(BATCH):
            call(tensor)
        return tensor

    _, recording = runtime.record(compute)
    return [each / BATCH for each in seconds(recording.run, max(10, repetitions // BATCH))]


def measure(kind: str, ranks: int, work: tuple[int, list[int]]) -> Times:
    """Return the times of one round of `kind`."""
    memory = os.memfd_create("octavo-benchmark")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    context = multiprocessing.get_context("fork")
    out = context.SimpleQueue()
    processes = [
        context.Process(target=run_rank, args=(kind, rank, ranks, (memory, port), work, out)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    times: Times = out.get()
    for process in processes:
        process.join()
    os.close(memory)
    return times


def measure_mpi(prefix: Path, ranks: int, work: tuple[int, list[int]]) -> Times:
    """Return the times of one round of the MPI in the virtual environment `prefix`."""
    program = [prefix / "bin" / "python", Path(__file__).with_name("mpi_rank.py"), work[0], *work[1]]
    command = [prefix / "bin" / "mpiexec", "-n", ranks, *program]
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True, check=True)
    found: dict[str, dict[str, list[float]]] = json.loads(done.stdout)
    return {name: {int(size): times for size, times in sizes.items()} for name, sizes in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024], help="KiB of the result")
    parser.add_argument("--repetitions", type=int, default=300, help="calls of each size in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mpi", type=Path, help="a virtual environment with mpich and mpi4py")
    arguments = parser.parse_args()
    work = (arguments.repetitions, [size << 10 for size in arguments.sizes])
    runs: dict[str, Callable[[], Times]] = {kind: partial(measure, kind, arguments.ranks, work) for kind in KINDS}
    if arguments.mpi:
        runs["mpi"] = partial(measure_mpi, arguments.mpi, arguments.ranks, work)
    rounds: dict[str, list[Times]] = {kind: [] for kind in runs}
    for _ in range(arguments.rounds):
        for kind, run in runs.items():
            rounds[kind].append(run())
    figures = {
        f"{kind} {name} {size >> 10} KiB us": statistics.median(
            1e6 * each for times in found for each in times[name][size]
        )
        for kind, found in rounds.items()
        for name in found[0]
        for size in work[1]
    }
    given = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
    report("collectives", given, figures)


if __name__ == "__main__":
    main()
