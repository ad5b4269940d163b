"""What the machine gives at best: `python -m benchmarks.kernels.ceilings`. The other kernel benchmarks compare with it.

Memory: plain reads of 512 MB in pages of 2 MB (where the system grants them), and of pieces that stay in the caches.
Arithmetic: independent operations between registers. Best of a few repetitions, with one thread and with all.
"""

from __future__ import annotations

import argparse
import dataclasses
import mmap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from octavo.cli.report import report
from octavo.devices.cpu.runtime import CpuRuntime
from octavo.platform import Platform

ARITHMETIC: Final[Mapping[str, int]] = {
    "float32": 0,
    "bfloat16": 1,
    "int8": 2,
    "tiles_bfloat16": 3,
    "tiles_int8": 4,
}
"""Kinds of arithmetic and the library's numbers for them: multiply-add, dot products of pairs and fours, and AMX's."""

_DRAM_BYTES = 512 << 20
_PAGE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Rate:
    """What one thread reaches, and all of them together."""

    one: float
    all: float

    def of(self, threads: int) -> float:
        """The rate of one thread, or of more than one."""
        return self.one if threads == 1 else self.all


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Best rates of this machine in this process."""

    instruction_set: str
    threads: int
    read_gbps: dict[str, Rate]
    """GB/s from "dram", "l3" and "l2", as far as there are such caches."""
    compute_tops: dict[str, Rate]
    """Tera-operations per second (a multiply-add is two) of every kind of `ARITHMETIC` that the level has."""

    @property
    def dram(self) -> Rate:
        """GB/s from memory."""
        return self.read_gbps["dram"]

    def table(self) -> str:
        """The rates for people."""
        rows = [(f"read {name}", rate, "GB/s") for name, rate in self.read_gbps.items()]
        rows += [(f"compute {name}", rate, "TOP/s") for name, rate in self.compute_tops.items()]
        lines = [f"ceilings at {self.instruction_set:24} {'1 thread':>10} {f'{self.threads} threads':>10}"]
        lines += [f"  {name:34} {rate.one:10.3f} {rate.all:10.3f} {unit}" for name, rate, unit in rows]
        return "\n".join(lines)


def measure(runtime: Any) -> Ceilings:
    """Measure with the runtime's instruction set and threads; takes about two seconds.

    Raises RuntimeError without a runtime: there are no kernels to measure then.
    """
    if runtime is None:
        raise RuntimeError("no kernels can run here, so there is nothing to measure: build octavo's compiled library")
    memory = mmap.mmap(-1, _DRAM_BYTES + _PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    held = torch.frombuffer(memory, dtype=torch.uint8)
    held.fill_(1)
    address = -(-held.data_ptr() // _PAGE_BYTES) * _PAGE_BYTES
    l2, l3 = (_cache_bytes(level) for level in (2, 3))
    sizes = {"dram": _DRAM_BYTES}
    if l3:
        sizes["l3"] = min(l3 // 2 // runtime.threads, 4 * l2)
    if l2:
        sizes["l2"] = l2 // 2
    return Ceilings(
        runtime.instruction_set,
        runtime.threads,
        {name: _read_rate(runtime, address, size, shared=name == "dram") for name, size in sizes.items()},
        {name: rate for name, kind in ARITHMETIC.items() if (rate := _compute_rate(runtime, kind)).one},
    )


def _read_rate(runtime: Any, address: int, num_bytes: int, *, shared: bool) -> Rate:
    """GB/s from `num_bytes`, which all threads share, or which each has its own of."""
    repeats = max(1, (64 << 20) // num_bytes)

    def rate(threads: int) -> float:
        total = num_bytes if shared else num_bytes * threads
        seconds = _best_s(lambda: runtime.cpu.probe_read(address, total, repeats, threads), threads)
        return total * repeats / seconds / 1e9

    return _both(rate, runtime.threads)


def _compute_rate(runtime: Any, kind: int) -> Rate:
    """Tera-operations per second; zero where the level has no such instructions."""
    # a millisecond's worth, so that other processes hit few of the repetitions
    few = 1 << 20
    seconds = _best_s(lambda: runtime.cpu.probe_compute(kind, few, 1), 1)
    count = int(few * max(1.0, 1e-3 / seconds))

    def rate(threads: int) -> float:
        done: int = runtime.cpu.probe_compute(kind, count, threads)
        return done / _best_s(lambda: runtime.cpu.probe_compute(kind, count, threads), threads, 10) / 1e12

    return _both(rate, runtime.threads)


def _both(rate: Callable[[int], float], threads: int) -> Rate:
    one = rate(1)
    return Rate(one, one if threads == 1 else rate(threads))


def clock(threads: int) -> Callable[[], float]:
    """Seconds: of the processor where one thread works, so that other processes on the machine do not count."""
    return time.thread_time if threads == 1 else time.perf_counter


def _best_s(call: Callable[[], object], threads: int, repetitions: int = 5) -> float:
    now, times = clock(threads), []
    for _ in range(repetitions):
        began = now()
        call()
        times.append(now() - began)
    return min(times)


def _cache_bytes(level: int) -> int:
    """Size of the first processor's data cache of that level; 0 where the system does not tell."""
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        if (index / "level").read_text().strip() == str(level) and (
            index / "type"
        ).read_text().strip() != "Instruction":
            text = (index / "size").read_text().strip()
            return int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1], 0)
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    platform = Platform.detect()
    parser.add_argument("--threads", type=int, default=platform.cores)
    parser.add_argument("--instruction-set", default="auto")
    arguments = parser.parse_args()
    ceilings = measure(CpuRuntime.open(arguments.threads, arguments.instruction_set))
    print(ceilings.table())
    report("kernels.ceilings", {"arguments": vars(arguments)}, dataclasses.asdict(ceilings))


if __name__ == "__main__":
    main()
