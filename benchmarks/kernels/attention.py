"""Paged attention beside torch's: `python -m benchmarks.kernels.attention`.

Decode steps are rated by the bytes of keys and values that they read (fresh from memory: caches of many layers take
turns), prefill by its multiplications and additions under the causal mask. Both against ceilings of the same run.
torch's `scaled_dot_product_attention` has dense keys and values, already padded to one length. Medians of turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.ceilings import Ceilings, measure
from octavo.attention.backend import Scores
from octavo.attention.cache_format import CACHE_DTYPES
from octavo.attention.metadata import AttentionMetadata
from octavo.cli.report import report
from octavo.devices.cpu.attention import CpuBackend
from octavo.devices.cpu.runtime import CpuRuntime
from octavo.ops.memory import zeroed
from octavo.platform import Platform

BLOCK_SIZE: Final = 16
_ROTATED_BYTES: Final = 128 << 20
"""Caches that take turns are at least this large together: more than a processor keeps."""


@dataclass(frozen=True)
class Case:
    """Equal rows: `context` tokens in the cache, `queries` more in this step."""

    rows: int
    context: int
    queries: int

    @property
    def name(self) -> str:
        if self.queries == 1:
            return f"decode {self.rows} x {self.context:,}"
        return f"{self.rows} x {self.queries} new after {self.context:,}"

    @property
    def length(self) -> int:
        return self.context + self.queries


CASES = (
    Case(1, 1000, 1),
    Case(1, 2048, 1),
    Case(32, 256, 1),
    Case(32, 1024, 1),
    Case(1, 0, 512),
    Case(1, 0, 2048),
    Case(1, 1920, 128),
)


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int


@dataclass(frozen=True)
class Result:
    case: str
    us: float
    torch_us: float
    rate: float
    """GB/s of a decode step, TFLOP/s of a prefill."""
    unit: str
    of_ceiling: float


def run_case(
    runtime: Any, ceilings: Ceilings, case: Case, shape: Shape, dtype: torch.dtype, cache_dtype: torch.dtype, turns: int
) -> Result:
    """Time one case; the answers' agreement is a matter of tests/conformance."""
    backend = CpuBackend(runtime, cache_dtype)
    blocks = -(-case.length // BLOCK_SIZE)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(case.rows * blocks, generator=generator) + 1
    tables = order.view(case.rows, blocks).tolist()
    metadata = AttentionMetadata.build([case.queries] * case.rows, [case.length] * case.rows, tables, BLOCK_SIZE)
    cache_shape = backend.cache_shape(case.rows * blocks + 1, BLOCK_SIZE, shape.kv_heads, shape.dim)
    cache_bytes = torch.Size(cache_shape).numel() * backend.element_type.itemsize
    # a prefill reads what it has just written
    layers = max(1, _ROTATED_BYTES // cache_bytes + 1) if case.queries == 1 else 1
    caches = [zeroed(cache_shape, backend.element_type).fill_(1) for _ in range(layers)]
    tokens = case.rows * case.queries
    q = torch.randn(tokens, shape.heads, shape.dim, generator=generator).to(dtype)
    k, v = (torch.randn(tokens, shape.kv_heads, shape.dim, generator=generator).to(dtype) for _ in range(2))

    def ours() -> None:
        for cache in caches:
            backend.run(q, k, v, cache, metadata, Scores(shape.dim**-0.5))

    theirs = _torch_attention(case, shape, dtype, layers)
    ours_s, torch_s = _alternate(ours, theirs, turns)
    ours_s, torch_s = ours_s / layers, torch_s / layers
    if case.queries == 1:
        # what an ideal reader reads: no padding, every key and value once
        rate = case.rows * case.length * cache_bytes / ((case.rows * blocks + 1) * BLOCK_SIZE) / ours_s / 1e9
        return Result(case.name, ours_s * 1e6, torch_s * 1e6, rate, "GB/s", rate / ceilings.dram.of(runtime.threads))
    pairs = case.rows * sum(range(case.context + 1, case.length + 1))
    rate = 4 * pairs * shape.heads * shape.dim / ours_s / 1e12
    kinds = ("tiles_bfloat16", "bfloat16", "float32") if dtype is torch.bfloat16 else ("float32",)
    best = max(ceilings.compute_tops[kind].of(runtime.threads) for kind in kinds if kind in ceilings.compute_tops)
    return Result(case.name, ours_s * 1e6, torch_s * 1e6, rate, "TFLOP/s", rate / best)


def _torch_attention(case: Case, shape: Shape, dtype: torch.dtype, layers: int) -> Callable[[], None]:
    def draw(heads: int, length: int) -> Tensor:
        return torch.randn(case.rows, heads, length, shape.dim).to(dtype)

    q = draw(shape.heads, case.queries)
    kept = [(draw(shape.kv_heads, case.length), draw(shape.kv_heads, case.length)) for _ in range(layers)]
    is_whole = case.context == 0 and case.queries > 1
    positions = torch.arange(case.length)
    mask = positions[None, :] <= positions[case.context :, None] if case.queries > 1 and not is_whole else None

    def attend() -> None:
        for k, v in kept:
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_whole, enable_gqa=True)

    return attend


def _alternate(one: Callable[[], None], other: Callable[[], None], turns: int) -> tuple[float, float]:
    """Median seconds of both, taking turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns + 1):
        for call, seconds in zip((one, other), times, strict=True):
            began = time.perf_counter()
            call()
            if turn:
                seconds.append(time.perf_counter() - began)
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    platform = Platform.detect()
    parser.add_argument("--threads", type=int, default=platform.cores)
    parser.add_argument("--instruction-set", default="auto")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--kv-cache-dtype", choices=("float32", "bfloat16", "int8", "fp8"), default="bfloat16")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--only", default="", help="Cases whose name contains this.")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    runtime = CpuRuntime.open(arguments.threads, arguments.instruction_set)
    ceilings = measure(runtime)
    shape = Shape(arguments.heads, arguments.kv_heads, arguments.head_dim)
    dtype, cache_dtype = CACHE_DTYPES[arguments.dtype], CACHE_DTYPES[arguments.kv_cache_dtype]
    print(ceilings.table())
    print(f"{'':24} {'octavo us':>10} {'torch us':>10} {'ratio':>6} {'rate':>8}          of ceiling")
    results = []
    for case in CASES:
        if arguments.only not in case.name:
            continue
        result = run_case(runtime, ceilings, case, shape, dtype, cache_dtype, arguments.turns)
        results.append(result)
        print(
            f"{result.case:24} {result.us:10.1f} {result.torch_us:10.1f} {result.torch_us / result.us:6.2f} "
            f"{result.rate:8.3f} {result.unit:8} {result.of_ceiling:7.0%}",
            flush=True,
        )
    report("kernels.attention", {"arguments": vars(arguments)}, {"cases": [asdict(result) for result in results]})


if __name__ == "__main__":
    main()
