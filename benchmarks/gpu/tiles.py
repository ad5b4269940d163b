"""Times of tiles that the compiler cannot choose between, on a GPU: of products of few rows, and of attention.

`python -m benchmarks.gpu.tiles`

`us` is the time from one launch to the next in a CUDA graph; that of a product has the launch that makes the codes of
activations too. Each launch of a product has other weights, which are not in the L2 cache, as in a step; keys of a row
of 224 tokens are. `changed` is what differs from what engines launch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu.kept import kept
from benchmarks.gpu.small import LAUNCHES, microseconds
from octavo.attention.backend import Scores
from octavo.devices.cuda.attention import CudaBackend
from octavo.devices.cuda.ops import linear as linear_module
from octavo.devices.cuda.runtime import CudaRuntime, Launcher, launch_by_triton
from octavo.ops.prepare_quantized import INT4, INT8

SHAPES: Final = ((4096, 1024), (1024, 3072), (6144, 4096), (12_288, 4096), (4096, 12_288))
"""Outputs and inputs of products of Qwen3-0.6B and 8B."""
CODES: Final = {"int4": replace(INT4, activation_bits=16), "int4, activations of 8 bits": INT4, "int8": INT8}
OF_CODES: Final[tuple[dict[str, int], ...]] = (
    *({}, {"BN": 32}, {"BN": 32, "num_warps": 2}),
    *({"num_stages": 3}, {"num_stages": 6}, {"STEPS": 2}),
)
PLAIN: Final = ((4096, 1024), (1024, 2048), (1024, 3072), (6144, 4096), (4096, 4096), (4096, 12_288), (151_936, 1024))
GATED: Final = ((6144, 1024), (24_576, 4096))
"""Outputs and inputs of products with plain weights of the same models, those with a gate by themselves."""
OF_PLAIN: Final[tuple[dict[str, int], ...]] = (
    *({}, {"num_stages": 5}, {"num_stages": 8}, {"BK": 256, "num_stages": 4}, {"BN": 16}, {"BN": 16, "num_warps": 2}),
    *({"BN": 16, "num_warps": 2, "num_stages": 8}, {"BN": 64}),
)
"""Other outputs divide inputs into other chunks, so they change bits."""
OF_DECODES: Final[tuple[dict[str, int], ...]] = (
    *({}, {"num_stages": 5}, {"num_warps": 8}, {"TILE": 64}, {"TILE": 64, "num_stages": 5}),
)
OF_PROMPTS: Final[tuple[dict[str, int], ...]] = ({}, {"TILE": 64}, {"TILE": 64, "num_stages": 4}, {"num_stages": 2})


COLD_BYTES: Final = 150 << 20
"""Of the weights that launches take in turns: three times the L2 cache of Hopper."""


def in_turns(
    prepare: Callable[[Tensor], Callable[[Tensor], Tensor]], outputs: int, inputs: int
) -> Callable[[Tensor], Tensor]:
    """Return what multiplies with another weight [outputs, inputs] at each call."""
    count = min(LAUNCHES, -(-COLD_BYTES // (outputs * inputs)))
    weights = (torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(count))
    linears = cycle([prepare(weight) for weight in weights])
    return lambda x: next(linears)(x)


def with_changes(changes: Mapping[str, int], launch: Launcher = launch_by_triton) -> Launcher:
    """Return what launches products with codes, and attention, with other constants."""

    def launch_with(kernel: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        if kernel in ("coded.coded_linear", "attention.attend"):
            constants |= changes
        if kernel == "coded.coded_linear":
            grid = (grid[0], -(-arguments[-3] // (1 + constants["IS_GATED"]) // constants["BN"]))
        launch(kernel, grid, *arguments, **constants)

    return launch_with


def timed(about: Mapping[str, Any], call: Callable[[], Any]) -> Iterator[dict[str, Any]]:
    """Yield the time of a call; a tile may need more shared memory than a GPU has."""
    yield from kept(about, lambda: [{"us": round(microseconds(call), 2)}])


def products(rows: Sequence[int] = (1, 32)) -> Iterator[dict[str, Any]]:
    """Yield the time of each product with each tile."""
    for name, spec in CODES.items():
        for (outputs, inputs), changes in product(SHAPES, OF_CODES):
            prepare = CudaRuntime(launch=with_changes(changes)).bind().prepare_quantized(spec)
            linear = in_turns(prepare, outputs, inputs)
            for tokens in rows:
                x = torch.randn(tokens, inputs, device="cuda", dtype=torch.bfloat16)
                about = {"tile": name, "shape": (tokens, outputs, inputs), "changed": changes}
                yield from timed(about, partial(linear, x))


def plain(rows: Sequence[int] = (1, 8, 9)) -> Iterator[dict[str, Any]]:
    """Yield the time of each product with a plain weight with each tile; of up to 8 rows 2 or 4 chunks are computed by
    one program, of more rows by several."""
    for (outputs, inputs), changes in product((*PLAIN, *GATED), OF_PLAIN):
        is_gated = (outputs, inputs) in GATED
        with patch.dict(linear_module._READING, changes), patch.dict(linear_module._READING_GATED, changes):
            prepare = partial(CudaRuntime(is_invariant=True).bind().prepare_linear, gated=is_gated)
            linear = in_turns(prepare, outputs, inputs)
            for tokens in rows:
                x = torch.randn(tokens, inputs, device="cuda", dtype=torch.bfloat16)
                about = {"tile": "gated" if is_gated else "plain", "shape": (tokens, outputs, inputs)}
                yield from timed({**about, "changed": changes}, partial(linear, x))


def decodes(
    sizes: Sequence[tuple[int, int]] = ((1, 224), (1, 4096), (64, 224), (64, 4096)),
) -> Iterator[dict[str, Any]]:
    """Yield the time of the attention of a decode step of so many rows of a length with each tile."""
    from benchmarks.gpu.parts import DIM, step

    for (rows, length), changes in product(sizes, OF_DECODES):
        metadata, q, k, v, cache = step(rows, 1, length)
        backend = CudaBackend(CudaRuntime(launch=with_changes(changes)), torch.bfloat16)
        about = {"tile": "decode", "rows": rows, "length": length, "changed": changes}
        yield from timed(about, partial(backend.run, q, k[:0], v[:0], cache, metadata, Scores(DIM**-0.5)))


def prompts(lengths: Sequence[int] = (2048, 8192)) -> Iterator[dict[str, Any]]:
    """Yield the time of the attention of each prompt with each tile."""
    from benchmarks.gpu.parts import DIM, step

    for length, changes in product(lengths, OF_PROMPTS):
        metadata, q, k, v, cache = step(1, length, length)
        backend = CudaBackend(CudaRuntime(launch=with_changes(changes)), torch.bfloat16)
        about = {"tile": "prompt", "length": length, "changed": changes}
        yield from timed(about, partial(backend.run, q, k[:0], v[:0], cache, metadata, Scores(DIM**-0.5)))


def tiles() -> Iterator[dict[str, Any]]:
    """Yield all of them."""
    yield from plain()
    yield from decodes()
    yield from products()
    yield from prompts()


def main() -> None:
    """Print the times."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}), flush=True)
    for line in tiles():
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
