"""Norms, rotary embedding, activations and sums: `python -m benchmarks.kernels.elementwise`, beside torch's.

µs of a call from Python (its smallest median of three), GB/s of what it reads and writes, and the fraction of the
ceiling: of the cache that holds the tensors where they fit one, else of memory. torch runs on as many threads.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.ceilings import Ceilings, measure
from octavo.cli.report import report
from octavo.devices.cpu.runtime import CpuRuntime
from octavo.ops.registry import Ops, operators
from octavo.ops.rotary import rotary_table

HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128
MOST_REPETITIONS = 300


def cases(tokens: int, hidden: int, dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...], int]]:
    """Operator, its arguments, and the elements that it reads and writes at least."""
    x, residual, weight, bias = (
        torch.randn(shape).to(dtype) for shape in ((tokens, hidden), (tokens, hidden), (hidden,), (hidden,))
    )
    yield "rms_norm", (x, weight, 1e-6), 2 * tokens * hidden
    yield "add_rms_norm", (x, residual, weight, 1e-6), 4 * tokens * hidden
    yield "add_layer_norm", (x, residual, weight, bias, 1e-6), 4 * tokens * hidden
    qkv = torch.randn(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM).to(dtype)
    q, k, _ = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    table = rotary_table(10_000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM), 4096)
    positions = torch.randint(4096, (tokens,))
    norms = torch.rand(2, HEAD_DIM).to(dtype).unbind()
    turned = 2 * tokens * (HEADS + KV_HEADS) * HEAD_DIM
    yield "rotary", (q, k, positions, table), turned
    yield "rotary with norms", (q, k, positions, table, *norms, (1e-6, 0.0)), turned
    wide = torch.randn(tokens, 6 * hidden).to(dtype)
    yield "silu_and_mul", (wide,), 9 * tokens * hidden
    yield "gelu", (wide,), 12 * tokens * hidden
    yield "gelu_tanh", (wide,), 12 * tokens * hidden
    yield "add", (x, residual), 3 * tokens * hidden
    yield "embedding", (torch.randint(1000, (tokens,)), torch.randn(1000, hidden).to(dtype)), 2 * tokens * hidden


def median_us(call: Callable[[], object]) -> float:
    """Smallest of three medians, so that other processes do not count."""
    began = time.perf_counter()
    call()
    repetitions = max(5, min(MOST_REPETITIONS, int(0.02 / max(1e-7, time.perf_counter() - began))))
    medians = []
    for _ in range(3):
        times = []
        for _ in range(repetitions):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        medians.append(statistics.median(times))
    return min(medians) * 1e6


def ceiling_gbps(ceilings: Ceilings, num_bytes: float) -> float:
    """What the place that `num_bytes` fit into gives."""
    if "l2" in ceilings.read_gbps and num_bytes <= 256 << 10:
        return ceilings.read_gbps["l2"].of(ceilings.threads)
    if "l3" in ceilings.read_gbps and num_bytes <= 8 << 20:
        return ceilings.read_gbps["l3"].of(ceilings.threads)
    return ceilings.dram.of(ceilings.threads)


def compare(ops: Ops, ceilings: Ceilings, tokens: int, hidden: int, dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Figures of every case."""
    references = operators()
    figures = {}
    for name, arguments, elements in cases(tokens, hidden, dtype):
        operator = name.split()[0]
        ours = median_us(partial(getattr(ops, operator), *arguments))
        torchs = median_us(partial(references[operator].reference, *arguments))
        num_bytes = elements * dtype.itemsize
        gbps = num_bytes / ours / 1e3
        figures[name] = {
            "us": ours,
            "gbps": gbps,
            "of_ceiling": gbps / ceiling_gbps(ceilings, num_bytes),
            "torch_us": torchs,
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 32, 512])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--instruction-set", default="auto")
    arguments = parser.parse_args()
    runtime = CpuRuntime.open(arguments.threads, arguments.instruction_set)
    ops, ceilings = runtime.bind(), measure(runtime)
    torch.set_num_threads(arguments.threads)
    print(ceilings.table())
    figures = {}
    with torch.inference_mode():
        for tokens in arguments.tokens:
            figures[str(tokens)] = compare(ops, ceilings, tokens, arguments.hidden, getattr(torch, arguments.dtype))
            print(f"{tokens:5} tokens           {'µs':>10} {'GB/s':>8} {'ceiling':>8} {'torch µs':>10}")
            for name, each in figures[str(tokens)].items():
                print(
                    f"  {name:20} {each['us']:10.1f} {each['gbps']:8.1f} {each['of_ceiling']:8.0%} "
                    f"{each['torch_us']:10.1f}"
                )
    report(
        "kernels.elementwise",
        {"arguments": vars(arguments)},
        {"ceilings": dataclasses.asdict(ceilings), "by_tokens": figures},
    )


if __name__ == "__main__":
    main()
