"""Products with plain weights: by cuBLAS, or in Triton where their bits must not depend on the number of rows.

Those of experts are one kernel; only the device reads which rows belong to which expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from octavo.devices.cuda.ops.elementwise import of_halves
from octavo.devices.cuda.runtime import CudaRuntime, compute_type, dense, power_of_2
from octavo.ops.experts import PreparedStack, Routing
from octavo.ops.prepare_linear import LinearShape, PlainFormat, PlainLinear, PreparedLinear
from octavo.ops.registry import Implementation

MIDDLE: Final = {"BM": 32, "BN": 64, "BK": 64, "num_warps": 4, "num_stages": 3}
"""The tile where nothing better is known, of stacks as of single weights: a row has the same bits."""
LARGE: Final = {"BM": 128, "BN": 64, "BK": 64, "num_warps": 8, "num_stages": 3}
"""The tile of steps whose experts have many rows, if bits may depend on the number of rows."""
_MANY_ROWS: Final = 64
"""Least rows for each expert with `LARGE`."""
_LEAST: Final = 128
"""Least number of experts whose row counts a program reads: fewer are not faster, and would need other binaries."""
FEW: Final = 16
"""Up to so many rows, the time of a product is the time to read the weight, by cuBLAS and by Triton."""
_READING: Final = {"BN": 32, "BK": 128, "num_warps": 4, "num_stages": 5}
"""Columns and inputs of tiles of up to 64 rows: small ones, so that enough programs read the weight."""
_READING_GATED: Final = {**_READING, "num_stages": 4}
"""The same with a gate, whose stages are larger: three programs of 16 rows share an SM of Hopper, as without one."""
MEDIUM: Final = {"BM": 64, "BN": 64, "BK": 64, "num_warps": 4, "num_stages": 4}
MANY: Final = {"BM": 128, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 4}
MANY_GATED: Final = {**MANY, "num_stages": 3}
_FULL: Final = 96
"""Programs of the largest tile that keep a GPU busy."""
_PROGRAMS, _LONG = {False: 128, True: 192}, 4096
"""Programs that read a weight at full speed: with fewer inputs than `_LONG`, and with at least as many."""
_LEAST_CHUNK: Final = 256
AT_ONCE: Final = (2, 4)
"""Numbers of chunks that a program may compute in parallel; its tile has fewer columns by the same factor."""
_MOST_AT_ONCE: Final = 8
"""Most rows of a program that computes chunks in parallel: it reads all inputs of its rows, not those of one chunk."""


def chunks_of(columns: int, inputs: int) -> tuple[int, int]:
    """Return into how many chunks the inputs of a weight are divided, and the inputs of a chunk.

    They depend on the weight alone, so that the order of sums does. columns: of all ranks, for whom it is the same.
    """
    programs, wanted = -(-columns // _READING["BN"]), _PROGRAMS[inputs >= _LONG]
    number = 1
    while programs * number < wanted and inputs // (2 * number) >= _LEAST_CHUNK:
        number *= 2
    step = _READING["BK"]
    chunk = -(-inputs // (number * step)) * step
    return -(-inputs // chunk), chunk


class Chunks(NamedTuple):
    """So many chunks of `inputs` each, which may have programs of their own. arrived: counters for them, which no two
    streams may use at a time."""

    number: int
    inputs: int
    arrived: Tensor


class InvariantLinear(PlainLinear):
    """The weight as the checkpoint has it. A row has the same bits for any number of rows, and of ranks."""

    def __init__(self, shape: LinearShape, state: Mapping[str, Tensor], runtime: CudaRuntime, group: int = 0) -> None:
        """group: as in `multiplied`, whose `weight` is `codes` of the state; 0 for a plain weight."""
        super().__init__(shape, state)
        self._runtime, self._group = runtime, group
        self._given = {**state, "weight": runtime.floats(state["codes"])} if group else self._state
        tiles = -(-shape.outputs // _READING["BN"])
        self._arrived = torch.zeros(tiles, dtype=torch.int32, device=next(iter(state.values())).device)

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        return self._product(x, x.dtype, add)

    def in_float32(self, x: Tensor) -> Tensor:
        return self._product(x, torch.float32)

    def by_head(self, x: Tensor, outputs: int) -> Tensor:
        heads = self._state["weight"].view(x.shape[1], -1, self.shape.inputs)
        found = [
            multiplied(self._runtime, x[:, i].contiguous(), {"weight": weight[:outputs].contiguous()}, x.dtype)
            for i, weight in enumerate(heads)
        ]
        return torch.stack(found, dim=1)

    def _product(self, x: Tensor, dtype: torch.dtype, add: Tensor | None = None) -> Tensor:
        shape, chunks = self.shape, None
        if not shape.is_gated:
            # of the columns of all ranks, which are known when the weight is made
            chunks = Chunks(*chunks_of(shape.all_outputs or shape.outputs, shape.inputs), self._arrived)
        given = self._runtime, x, self._given, dtype
        return multiplied(*given, add=add, gated=shape.is_gated, chunks=chunks, group=self._group)


def tile_of(tokens: int, columns: int, dtype: torch.dtype, *, gated: bool) -> dict[str, int]:
    """Return rows, columns and inputs of a program, with its warps and the tiles that are on their way to it."""
    if dtype is torch.float32:
        return MIDDLE
    if tokens <= 64:
        return {"BM": power_of_2(tokens), **(_READING_GATED if gated else _READING)}
    is_full = -(-tokens // MANY["BM"]) * -(-columns // MANY["BN"]) >= _FULL
    if not is_full:
        return MEDIUM
    return MANY_GATED if gated else MANY


def multiplied(
    runtime: CudaRuntime,
    x: Tensor,
    state: Mapping[str, Tensor],
    dtype: torch.dtype,
    *,
    add: Tensor | None = None,
    gated: bool = False,
    chunks: Chunks | None = None,
    group: int = 0,
) -> Tensor:
    """Return `x @ weight.T + bias + add` in `dtype`, with the same bits of a row for any number of rows.

    state: `weight`, perhaps `bias`, and of a weight in floats of 8 bits `scales`, one for each row and `group` of
    inputs (1: for each row). chunks: how the inputs are divided; None where the order of sums depends neither on the
    number of inputs nor on that of columns.
    """
    x, weight = dense(x), state["weight"]
    (tokens, inputs), outputs = x.shape, len(weight)
    width = outputs // 2 if gated else outputs
    out = torch.empty((tokens, width), dtype=dtype, device=x.device)
    tile = tile_of(tokens, width, x.dtype, gated=gated)
    number, chunk, arrived = chunks or (1, inputs, out)
    is_divided = number > 1 and tokens <= tile["BM"] and tile["BN"] == _READING["BN"]
    options: dict[str, Any] = {**tile, "TYPE": compute_type(x), "CHUNKS": number}
    options |= {"HAS_BIAS": "bias" in state, "HAS_ADDEND": add is not None}
    bias, add = state.get("bias", weight), out if add is None else add.contiguous()
    is_at_once = is_divided and number in AT_ONCE and tokens <= _MOST_AT_ONCE and not group
    if is_at_once and number * chunk == inputs and not number * width % tile["BN"]:
        options["BN"] = tile["BN"] // number
        numbers = x.stride(0), out.stride(0), tokens, outputs, inputs, chunk
        grid = (width // options["BN"],)
        runtime.launch("linear.chunks_at_once", grid, x, weight, bias, add, out, *numbers, **options)
        return out
    parts = torch.empty((number, tokens, width), dtype=torch.float32, device=x.device) if is_divided else out
    rows, columns = -(-tokens // tile["BM"]), -(-width // tile["BN"])
    runtime.launch(
        "linear.linear",
        (rows, columns, number) if is_divided else (rows, columns),
        *(x, weight, state.get("scales", weight), bias, add, out),
        *(parts, arrived, x.stride(0), out.stride(0), tokens, outputs, inputs, chunk),
        IS_GATED=gated,
        IS_DIVIDED=is_divided,
        EVEN=not (inputs % tile["BK"] or width % tile["BN"]),
        GROUP=group,
        **options,
    )
    return out


class CublasLinear(PlainLinear):
    """The weight as the checkpoint has it, multiplied by cuBLAS, with few rows by the kernel that reads it fastest. A
    gated product is activated in one launch."""

    def __init__(self, shape: LinearShape, state: Mapping[str, Tensor], runtime: CudaRuntime) -> None:
        super().__init__(shape, state, partial(of_halves, "silu_and_mul", runtime))
        # on several ranks the order of sums is that of the share
        self._of_few = InvariantLinear(replace(shape, all_outputs=0), state, runtime)

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        return self._of_few(x, add) if _has_few(x) else super().__call__(x, add)

    def in_float32(self, x: Tensor) -> Tensor:
        return self._of_few.in_float32(x) if _has_few(x) else super().in_float32(x)


def _has_few(x: Tensor) -> bool:
    return len(x) <= FEW and x.dtype is not torch.float32


def grouped_arguments(
    stack: PreparedStack, routing: Routing, *, of_tokens: bool
) -> tuple[tuple[Tensor, Tensor], tuple[int, int], dict[str, Any]]:
    """Return the tensors, numbers and constants from which the kernels of a stack find the rows of each expert."""
    constants = {"E": power_of_2(stack.experts, _LEAST), "OF_TOKENS": of_tokens}
    return (routing.order, routing.starts[stack.first :]), (stack.experts, routing.weights.shape[1]), constants


def num_tiles(stack: PreparedStack, routing: Routing, rows: int) -> int:
    """Return the most tiles of `rows` rows that the experts of a stack have: each may have one that is not full."""
    pairs = len(routing.order)
    return pairs // rows + min(pairs, stack.experts)


def room_for_rows(stack: PreparedStack, routing: Routing, shape: LinearShape, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the result tensor [pairs, outputs], zeroed if some rows may belong to experts outside the stack."""
    has_all = stack.experts == len(routing.starts) - 1
    make = torch.empty if has_all else torch.zeros
    return make((len(routing.order), shape.columns), dtype=dtype, device=x.device)


class GroupedStack(PreparedStack):
    """Weights [experts, outputs, inputs], with biases [experts, outputs], multiplied by one kernel. State: `weight`, or
    `codes` and `scales` of floats of 8 bits; perhaps `bias`."""

    def __init__(
        self, shape: LinearShape, state: Mapping[str, Tensor], first: int, runtime: CudaRuntime, group: int = 0
    ) -> None:
        """group: inputs that share a scale (1: all); 0 without scales."""
        super().__init__(state, first)
        self._shape, self._runtime, self._group = shape, runtime, group
        self._weights = runtime.floats(state["codes"].contiguous()) if group else state["weight"].contiguous()
        self._scales, self._biases = state["scales"].contiguous() if group else self._weights, state.get("bias")

    def __call__(self, x: Tensor, routing: Routing, *, of_tokens: bool, in_float32: bool = False) -> Tensor:
        x, shape = dense(x), self._shape
        out = room_for_rows(self, routing, shape, x, torch.float32 if in_float32 else x.dtype)
        has_many = len(out) >= _MANY_ROWS * self.experts and not self._runtime.is_invariant
        tile: dict[str, Any] = LARGE if has_many else MIDDLE
        tensors, numbers, constants = grouped_arguments(self, routing, of_tokens=of_tokens)
        self._runtime.launch(
            "linear.experts",
            (num_tiles(self, routing, tile["BM"]), -(-out.shape[1] // tile["BN"])),
            *(x, self._weights, self._scales, x if self._biases is None else self._biases, *tensors, out),
            *(x.stride(0), len(x), *numbers, shape.outputs, shape.inputs),
            HAS_BIAS=self._biases is not None,
            IS_GATED=shape.is_gated,
            GROUP=self._group,
            TYPE=compute_type(x),
            **constants,
            **tile,
        )
        return out


class CudaFormat(PlainFormat):
    """Weights as they are, multiplied by a class of products; those of experts are one kernel."""

    def __init__(self, product: Callable[..., PlainLinear], runtime: CudaRuntime) -> None:
        self._product, self._runtime = product, runtime

    def restore(self, shape: LinearShape, state: Mapping[str, Tensor]) -> PreparedLinear:
        return self._product(shape, state, self._runtime)

    def restore_stack(self, shape: LinearShape, state: Mapping[str, Tensor], first: int = 0) -> PreparedStack:
        return GroupedStack(shape, state, first, self._runtime)


def _obstacle(runtime: CudaRuntime) -> str | None:
    return None if runtime.is_invariant else "cuBLAS is faster, and batch_invariant is not set"


IMPLEMENTATIONS = (
    Implementation("prepare_linear", "triton", partial(CudaFormat, InvariantLinear), _obstacle, rank=2),
    Implementation("prepare_linear", "cublas", partial(CudaFormat, CublasLinear)),
)
