"""Stacks of the weights of experts on CUDA. Only the device reads which rows belong to which expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from octavo.devices.cuda.runtime import CudaRuntime, compute_type, dense, power_of_2
from octavo.ops.experts import PreparedStack, Routing
from octavo.ops.prepare_linear import LinearShape

MIDDLE: Final = {"BM": 32, "BN": 64, "BK": 64, "num_warps": 4, "num_stages": 3}
"""The tile where nothing better is known, of stacks as of single weights: a row has the same bits."""
LARGE: Final = {"BM": 128, "BN": 64, "BK": 64, "num_warps": 8, "num_stages": 3}
"""The tile of steps whose experts have many rows, if bits may depend on the number of rows."""
_MANY: Final = 64
"""Least rows for each expert with `LARGE`."""
_LEAST: Final = 128
"""Least number of experts whose row counts a program reads: fewer are not faster, and would need other binaries."""


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
        has_many = len(out) >= _MANY * self.experts and not self._runtime.is_invariant
        tile: dict[str, Any] = LARGE if has_many else MIDDLE
        tensors, numbers, constants = grouped_arguments(self, routing, of_tokens=of_tokens)
        self._runtime.launch(
            "experts.experts",
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
