"""Linear layers with quantised weights: `python -m benchmarks.kernels.quantized`.

For every format, shape and number of rows: bits per weight, µs of a call from Python, GB/s of weights, TOP/s, and the
fraction of the larger of two floors: a plain read of as many bytes from memory, and the ceiling of the arithmetic.
Weights are taken in turns from more copies than the caches hold, and reads take turns with the calls. With one thread,
time is the processor time of that thread, in which other processes do not count; the lower quartiles are reported.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from dataclasses import replace
from itertools import cycle
from typing import Any, Final

import torch

from benchmarks.kernels.ceilings import Ceilings, measure
from octavo.cli.report import report
from octavo.devices.cpu.runtime import CpuRuntime
from octavo.ops.coded import CodeSpec, example_weight
from octavo.ops.memory import zeroed
from octavo.ops.prepare_linear import PreparedLinear
from octavo.ops.registry import Ops
from octavo.quantization.registry import QUANTIZED

SHAPES: Final = {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)}
"""(outputs, inputs) of the layers of Qwen3-0.6B; gate_up is gated."""
FORMATS: Final = {
    **QUANTIZED,
    "w8a16-g128": CodeSpec(8, 128, "none", torch.bfloat16),
    "w4a16-g32": CodeSpec(4, 32, "none", torch.bfloat16),
    "gptq-g128": CodeSpec(4, 128, "zeros", torch.float16),
    "gptq-g128-act-order": CodeSpec(4, 128, "zeros", torch.float16, has_order=True),
    "mxfp4": CodeSpec(4, 32, "none", torch.bfloat16, is_float=True),
    "q8_0": CodeSpec(8, 32, "none", torch.float16),
    "q4_0": CodeSpec(4, 32, "none", torch.float16),
    "q4_1": CodeSpec(4, 32, "minimums", torch.float16),
    "q4_k": CodeSpec(4, 32, "minimums", torch.int8, 256),
    "q5_k": CodeSpec(8, 32, "minimums", torch.int8, 256),
    "q6_k": CodeSpec(8, 16, "none", torch.int8, 256),
}
"""Those of `--quantization`, and stored ones as checkpoints and GGUF files have them."""
_ALL_COPIES_BYTES = 192 << 20
_BUDGET_S = 0.4


class Reads:
    """Plain reads of memory that no cache holds."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._memory = zeroed((_ALL_COPIES_BYTES,), torch.uint8).fill_(1)
        self._next = 0

    def read(self, num_bytes: int) -> None:
        """Read `num_bytes` that were not read lately."""
        parts = self._runtime.threads
        span = num_bytes // (1024 * parts) * 1024 * parts
        if self._next + span > _ALL_COPIES_BYTES:
            self._next = 0
        self._runtime.cpu.probe_read(self._memory.data_ptr() + self._next, span, 1, parts)
        self._next += span


def call_and_read_s(layers: list[PreparedLinear], x: torch.Tensor, reads: Reads, threads: int) -> tuple[float, float]:
    """Seconds of a call, and of reading as many bytes; lower quartiles of many."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    calls: list[float] = []
    plain: list[float] = []
    ends = time.perf_counter() + _BUDGET_S
    for layer in cycle(layers):
        times = [clock()]
        layer(x)
        times.append(clock())
        reads.read(layer.nbytes)
        times.append(clock())
        calls.append(times[1] - times[0])
        plain.append(times[2] - times[1])
        if len(calls) >= 2 * len(layers) and time.perf_counter() > ends:
            break
    return sorted(calls)[len(calls) // 4], sorted(plain)[len(plain) // 4]


def figures_of(
    ops: Ops, ceilings: Ceilings, reads: Reads, spec: CodeSpec, shape: str, rows: list[int], dtype: torch.dtype
) -> dict[str, dict[str, float]]:
    """Figures for every number of rows."""
    outputs, inputs = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    weight = example_weight(spec, outputs, inputs, generator)
    kept = ops.prepare_coded(spec)
    first = kept(weight, dtype, gated=shape == "gate_up")
    copies = [first]
    while len(copies) <= _ALL_COPIES_BYTES // first.nbytes:
        state = {name: zeroed(tuple(each.shape), each.dtype).copy_(each) for name, each in first.state().items()}
        copies.append(kept.restore(first.shape, state))
    arithmetic = ceilings.compute_tops.get("tiles_int8", ceilings.compute_tops.get("int8"))
    found = {}
    for count in rows:
        x = torch.randn(count, inputs, generator=generator).to(dtype)
        seconds, memory_s = call_and_read_s(copies, x, reads, ceilings.threads)
        operations = 2.0 * count * outputs * inputs
        compute_s = operations / arithmetic.of(ceilings.threads) / 1e12 if arithmetic else 0.0
        found[str(count)] = {
            "bits": first.nbytes * 8 / (outputs * inputs),
            "us": seconds * 1e6,
            "gbps": first.nbytes / seconds / 1e9,
            "read_gbps": first.nbytes / memory_s / 1e9,
            "tops": operations / seconds / 1e12,
            "of_ceiling": max(memory_s, compute_s) / seconds,
        }
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["int8", "int4"])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64, 512])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--activation-bits", type=int, choices=[8, 16], default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--instruction-set", default="auto")
    arguments = parser.parse_args()
    runtime = CpuRuntime.open(arguments.threads, arguments.instruction_set)
    ops, ceilings = runtime.bind(), measure(runtime)
    reads = Reads(runtime)
    print(ceilings.table())
    print(f"{'':28} {'bits':>6} {'rows':>5} {'µs':>10} {'GB/s':>8} {'read':>8} {'TOP/s':>8} {'ceiling':>8}")
    figures: dict[str, dict[str, dict[str, float]]] = {}
    with torch.inference_mode():
        for name in arguments.formats:
            spec = replace(FORMATS[name], activation_bits=arguments.activation_bits)
            for shape in arguments.shapes:
                found = figures_of(ops, ceilings, reads, spec, shape, arguments.rows, getattr(torch, arguments.dtype))
                figures[f"{name} {shape}"] = found
                for count, each in found.items():
                    print(
                        f"{name + ' ' + shape:28} {each['bits']:6.3f} {count:>5} {each['us']:10.1f} "
                        f"{each['gbps']:8.1f} {each['read_gbps']:8.1f} {each['tops']:8.3f} {each['of_ceiling']:8.0%}",
                        flush=True,
                    )
    report(
        "kernels.quantized",
        {"arguments": vars(arguments)},
        {"ceilings": dataclasses.asdict(ceilings), "by_shape": figures},
    )


if __name__ == "__main__":
    main()
