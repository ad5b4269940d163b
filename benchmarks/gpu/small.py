"""Times of the small kernels of a layer on a GPU: norms, activations, the rotation of heads, writes to the cache.

`python -m benchmarks.gpu.small [--rows 1 16 64 256] [--hidden 1024 4096] [--warps 1 2 4 8 16]`

A kernel is launched `LAUNCHES` times in a CUDA graph, as a decode step launches it: `us` is the time from one launch to
the next. That of "none" is a kernel of one element, which is the least that a launch takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from octavo.attention.backend import Scores
from octavo.attention.metadata import AttentionMetadata
from octavo.devices.cuda.attention import CudaBackend, RotatingCudaBackend
from octavo.devices.cuda.runtime import CudaRuntime, Launcher, launch_by_triton
from octavo.ops.rotary import Rotation, rotary_table

LAUNCHES: Final = 20
ROWS: Final = (1, 16, 64, 256)
HIDDEN: Final = {1024: (16, 8), 4096: (32, 8)}
"""Sizes of models, and their heads of queries and of keys, of `DIM` each."""
WARPS: Final = (1, 2, 4, 8, 16)
DIM, BLOCK = 128, 16
_REPLAYS, _RUNS = 10, 7


def with_warps(num_warps: int, launch: Launcher = launch_by_triton) -> Launcher:
    """Return what launches every kernel with so many warps."""

    def launch_with(kernel: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        launch(kernel, grid, *arguments, **{**constants, "num_warps": num_warps})

    return launch_with


def calls(
    rows: int, hidden: int, launch: Launcher, device: str = "cuda", dtype: torch.dtype = torch.bfloat16
) -> dict[str, Callable[[], Any]]:
    """Return what launches each small kernel once, by its name."""
    heads, kv_heads = HIDDEN[hidden]
    runtime = CudaRuntime(launch=launch)
    ops = runtime.bind()
    common: dict[str, Any] = {"device": device, "dtype": dtype}
    x, weight, gated = (torch.randn(*shape, **common) for shape in ((rows, hidden), (hidden,), (rows, 6 * hidden)))
    heads_of_all = torch.randn(rows, heads + 2 * kv_heads, DIM, **common)
    q, k, v = heads_of_all.split([heads, kv_heads, kv_heads], dim=1)
    frequencies = 1e6 ** -(torch.arange(0, DIM, 2, device=device) / DIM)
    positions, table = torch.full((rows,), 500, device=device), rotary_table(frequencies, 1024)
    norm = torch.randn(DIM, **common)
    rotation = Rotation(positions, table, table, norm, norm, (1e-6, 0.0), interleaved=False)
    metadata = AttentionMetadata.of_slots(torch.arange(rows, device=device) * BLOCK + BLOCK, BLOCK)
    backends = {
        "store": CudaBackend(runtime, dtype),
        "store_codes": CudaBackend(runtime, torch.int8),
        "rotate_and_store": RotatingCudaBackend(runtime, dtype),
    }
    caches = {
        name: torch.zeros(each.cache_shape(rows + 2, BLOCK, kv_heads, DIM), dtype=each.element_type, device=device)
        for name, each in backends.items()
    }
    rotating = backends["rotate_and_store"]
    assert isinstance(rotating, RotatingCudaBackend)
    return {
        "rms_norm": lambda: ops.rms_norm(x, weight, 1e-6),
        "add_rms_norm": lambda: ops.add_rms_norm(x, x, weight, 1e-6),
        "silu_and_mul": lambda: ops.silu_and_mul(gated),
        "gelu_tanh_and_mul": lambda: ops.gelu_tanh_and_mul(gated),
        "rotary": lambda: rotation.of(ops.rotary, q, k),
        "store": lambda: backends["store"].run(q, k, v, caches["store"], metadata, Scores(1.0)),
        "store_codes": lambda: backends["store_codes"].run(q, k, v, caches["store_codes"], metadata, Scores(1.0)),
        "rotate_and_store": lambda: rotating.rotate_and_store(q, k, v, caches["rotate_and_store"], metadata, rotation),
    }


def microseconds(call: Callable[[], Any]) -> float:
    """Return the median time between launches of `call`, which makes one."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            call()
    graph.replay()
    found = []
    for _ in range(_RUNS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(_REPLAYS):
            graph.replay()
        last.record()
        torch.cuda.synchronize()
        found.append(first.elapsed_time(last) * 1e3 / _REPLAYS / LAUNCHES)
    return statistics.median(found)


def small(
    rows: Sequence[int] = ROWS, hidden: Sequence[int] = tuple(HIDDEN), warps: Sequence[int] = WARPS
) -> Iterator[dict[str, Any]]:
    """Yield the time of each small kernel with each number of warps."""
    one = torch.zeros(1, device="cuda")
    yield {"small": "none", "us": round(microseconds(one.zero_), 3)}
    for size in hidden:
        for num_rows in rows:
            of_warps = {each: calls(num_rows, size, with_warps(each)) for each in warps}
            for name in of_warps[warps[0]]:
                taken = {each: round(microseconds(made[name]), 3) for each, made in of_warps.items()}
                best = min(taken, key=lambda each: taken[each])
                yield {"small": name, "rows": num_rows, "hidden": size, "us_of_warps": taken, "best": best}


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--hidden", type=int, nargs="+", default=tuple(HIDDEN), choices=HIDDEN)
    parser.add_argument("--warps", type=int, nargs="+", default=WARPS)
    arguments = parser.parse_args()
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}), flush=True)
    for line in small(arguments.rows, arguments.hidden, arguments.warps):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
