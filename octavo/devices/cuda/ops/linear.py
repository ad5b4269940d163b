"""Products with plain weights: by cuBLAS, or in Triton where their bits must not depend on the number of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from octavo.devices.cuda.experts import GroupedStack
from octavo.devices.cuda.ops.elementwise import make_gated
from octavo.devices.cuda.runtime import CudaRuntime, compute_type
from octavo.ops.experts import PreparedStack
from octavo.ops.prepare_linear import LinearShape, PlainFormat, PlainLinear
from octavo.ops.registry import Implementation

TILE: Final = {"BM": 32, "BN": 64, "BK": 64}
"""Rows, columns and inputs of a program. With 64 rows or more Hopper would multiply by other instructions, in another
order."""


class InvariantLinear(PlainLinear):
    """The weight as the checkpoint has it. A row has the same bits for any number of rows."""

    def __init__(self, shape: LinearShape, state: Mapping[str, Tensor], runtime: CudaRuntime) -> None:
        super().__init__(shape, state)
        self._runtime = runtime

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        return self._product(x, x.dtype, add)

    def in_float32(self, x: Tensor) -> Tensor:
        return self._product(x, torch.float32, None)

    def by_head(self, x: Tensor, outputs: int) -> Tensor:
        heads = self._state["weight"].view(x.shape[1], -1, self.shape.inputs)
        found = [
            multiplied(self._runtime, x[:, i].contiguous(), weight[:outputs].contiguous(), x.dtype)
            for i, weight in enumerate(heads)
        ]
        return torch.stack(found, dim=1)

    def _product(self, x: Tensor, dtype: torch.dtype, add: Tensor | None) -> Tensor:
        gated, bias = self.shape.is_gated, self._state.get("bias")
        return multiplied(self._runtime, x, self._state["weight"], dtype, bias=bias, add=add, gated=gated)


def multiplied(
    runtime: CudaRuntime,
    x: Tensor,
    weight: Tensor,
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    add: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """Return `x @ weight.T + bias + add` in `dtype`, with the same bits of a row for any number of rows."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    (tokens, inputs), outputs = x.shape, len(weight)
    width = outputs // 2 if gated else outputs
    out = torch.empty((tokens, width), dtype=dtype, device=x.device)
    tile: dict[str, Any] = {**TILE, "TYPE": compute_type(x)}
    runtime.launch(
        "linear.linear",
        (-(-tokens // TILE["BM"]), -(-width // TILE["BN"])),
        *(x, weight, weight if bias is None else bias, out if add is None else add.contiguous(), out),
        *(x.stride(0), out.stride(0), tokens, outputs, inputs),
        HAS_BIAS=bias is not None,
        HAS_ADDEND=add is not None,
        IS_GATED=gated,
        **tile,
    )
    return out


class CublasLinear(PlainLinear):
    """The weight as the checkpoint has it, multiplied by cuBLAS. A gated product is activated in one launch."""

    def __init__(self, shape: LinearShape, state: Mapping[str, Tensor], runtime: CudaRuntime) -> None:
        super().__init__(shape, state)
        self._silu_and_mul = make_gated("silu_and_mul", runtime)

    def _activated(self, product: Tensor) -> Tensor:
        return self._silu_and_mul(product)


class CublasFormat(PlainFormat):
    """The format of `CublasLinear`; products of experts are one kernel."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime

    def restore(self, shape: LinearShape, state: Mapping[str, Tensor]) -> PlainLinear:
        return CublasLinear(shape, state, self._runtime)

    def restore_stack(self, shape: LinearShape, state: Mapping[str, Tensor], first: int = 0) -> PreparedStack:
        return GroupedStack(shape, state, first, self._runtime, TILE)


class InvariantFormat(CublasFormat):
    """The format of `InvariantLinear`."""

    def restore(self, shape: LinearShape, state: Mapping[str, Tensor]) -> PlainLinear:
        return InvariantLinear(shape, state, self._runtime)


def _obstacle(runtime: CudaRuntime) -> str | None:
    return None if runtime.is_invariant else "cuBLAS is faster, and batch_invariant is not set"


IMPLEMENTATIONS = (
    Implementation("prepare_linear", "triton", InvariantFormat, _obstacle, rank=2),
    Implementation("prepare_linear", "cublas", CublasFormat),
)
