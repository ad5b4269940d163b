"""One rank of an MPI program: times of its allreduce and allgather. Needs numpy and mpi4py, not octavo.

`mpiexec -n RANKS python mpi_rank.py REPETITIONS BYTES…`; rank 0 prints {collective: {bytes: seconds…}} as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np


def seconds(call: Callable[[], Any], repetitions: int) -> list[float]:
    """How long each of the calls took, after a tenth as many to warm up."""
    times = []
    for number in range(-repetitions // 10, repetitions):
        began = time.perf_counter()
        call()
        if number >= 0:
            times.append(time.perf_counter() - began)
    return times


def main(arguments: list[str]) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {processors[world.rank % len(processors)]})
    repetitions, *sizes = map(int, arguments)
    found: dict[str, dict[int, list[float]]] = {"sum": {}, "gather": {}}
    for size in sizes:
        whole, total = np.ones(size // 4, np.float32), np.empty(size // 4, np.float32)
        share = whole[: len(whole) // world.size].copy()
        found["sum"][size] = seconds(lambda: world.Allreduce(whole, total), repetitions)  # noqa: B023
        found["gather"][size] = seconds(lambda: world.Allgather(share, total), repetitions)  # noqa: B023
    if world.rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
