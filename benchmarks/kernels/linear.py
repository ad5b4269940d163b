"""Linear layers: `python -m benchmarks.kernels.linear`, beside torch's.

Every product of two models at several numbers of rows: GB/s of weights, TFLOP/s, the fraction of the ceiling (the
longer of reading the weights from memory and multiplying, both measured in the same run), and torch's `F.linear` on as
many threads. Both take turns, on weights that no cache holds; medians. Processor time with one thread.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F

from benchmarks.kernels.ceilings import Ceilings, clock, measure
from octavo.cli.report import report
from octavo.devices.cpu.runtime import CpuRuntime
from octavo.ops.registry import Ops

SHAPES: Final[dict[str, dict[str, tuple[int, int]]]] = {
    "qwen3-0.6b": {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)},
    "llama-3.2-1b": {"qkv": (3072, 2048), "o": (2048, 2048), "gate_up": (16384, 2048), "down": (2048, 8192)},
}
"""(outputs, inputs) of a layer's products."""
HEADS: Final[dict[str, tuple[int, int]]] = {"qwen3-0.6b": (151_936, 1024), "llama-3.2-1b": (128_256, 2048)}
_FRESH_BYTES: Final = 128 << 20
"""Weights are used in turn, so that none comes from a cache."""
_MOST_SECONDS: Final = 1.0


def ceiling_seconds(ceilings: Ceilings, weight_bytes: int, multiplies: int, dtype: torch.dtype) -> float:
    """The longer of reading the weights and of multiplying."""
    kinds = ("float32",) if dtype is torch.float32 else ("tiles_bfloat16", "bfloat16", "float32")
    kind = next(name for name in kinds if name in ceilings.compute_tops)
    reading = weight_bytes / ceilings.dram.of(ceilings.threads) / 1e9
    return max(reading, 2 * multiplies / ceilings.compute_tops[kind].of(ceilings.threads) / 1e12)


def take_turns(calls: Sequence[Callable[[int], object]], repetitions: int, threads: int) -> list[float]:
    """Median seconds of each; a call is given the number of its repetition."""
    times: list[list[float]] = [[] for _ in calls]
    now = clock(threads)
    began = now()
    for repetition in range(repetitions):
        for call, taken in zip(calls, times, strict=True):
            start = now()
            call(repetition)
            taken.append(now() - start)
        if repetition >= 4 and now() - began > _MOST_SECONDS:
            break
    return [statistics.median(taken) for taken in times]


def compare(
    ops: Ops, ceilings: Ceilings, outputs: int, inputs: int, rows: Sequence[int], dtype: torch.dtype
) -> dict[int, dict[str, float]]:
    """Figures by number of rows."""
    weight_bytes = outputs * inputs * dtype.itemsize
    copies = max(1, -(-_FRESH_BYTES // weight_bytes))
    plain = [(torch.randn(outputs, inputs) / inputs**0.5).to(dtype) for _ in range(copies)]
    prepared = [ops.prepare_linear(weight) for weight in plain]
    figures = {}
    for count in rows:
        x = torch.randn(count, inputs).to(dtype)
        ours, torchs = take_turns(
            (
                partial(lambda x, repetition: prepared[repetition % copies](x), x),
                partial(lambda x, repetition: F.linear(x, plain[repetition % copies]), x),
            ),
            max(2 * copies, 9),
            ceilings.threads,
        )
        multiplies = count * outputs * inputs
        figures[count] = {
            "us": ours * 1e6,
            "gbps": weight_bytes / ours / 1e9,
            "tflops": 2 * multiplies / ours / 1e12,
            "of_ceiling": ceiling_seconds(ceilings, weight_bytes, multiplies, dtype) / ours,
            "torch_us": torchs * 1e6,
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), nargs="+", default=sorted(SHAPES, reverse=True))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 32, 64, 128, 512])
    parser.add_argument("--head-rows", type=int, nargs="+", default=[1, 4, 32], help="rows that reach the head")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--instruction-set", default="auto")
    arguments = parser.parse_args()
    runtime = CpuRuntime.open(arguments.threads, arguments.instruction_set)
    ceilings = measure(runtime)
    ops, dtype = runtime.bind(), getattr(torch, arguments.dtype)
    torch.set_num_threads(arguments.threads)
    print(ceilings.table())
    figures: dict[str, Any] = {}
    with torch.inference_mode():
        for model in arguments.model:
            products = [(name, *shape, arguments.rows) for name, shape in SHAPES[model].items()]
            for name, outputs, inputs, rows in [*products, ("head", *HEADS[model], arguments.head_rows)]:
                figures[f"{model} {name}"] = found = compare(ops, ceilings, outputs, inputs, rows, dtype)
                print(f"{model} {name} {outputs}x{inputs}")
                print(
                    f"  {'rows':>6} {'µs':>10} {'GB/s':>8} {'TFLOP/s':>8} {'ceiling':>8} {'torch µs':>10} {'times':>6}"
                )
                for count, each in found.items():
                    print(
                        f"  {count:6} {each['us']:10.1f} {each['gbps']:8.1f} {each['tflops']:8.3f} "
                        f"{each['of_ceiling']:8.0%} {each['torch_us']:10.1f} {each['torch_us'] / each['us']:6.2f}"
                    )
    report("kernels.linear", {"arguments": vars(arguments)}, {"ceilings": dataclasses.asdict(ceilings), "us": figures})


if __name__ == "__main__":
    main()
