"""Stacks of the weights of experts on CUDA: which rows are whose is read on the device alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from octavo.devices.cuda.runtime import CudaRuntime, compute_type, power_of_2
from octavo.ops.experts import PreparedStack, Routing
from octavo.ops.prepare_linear import LinearShape

LARGE: Final = {"BM": 128, "BN": 64, "BK": 64, "num_warps": 8, "num_stages": 3}
"""The tile of steps whose experts have many rows, where bits may depend on that."""
_MANY: Final = 64
"""Rows for each expert from which on it is taken."""


class GroupedStack(PreparedStack):
    """Plain weights [experts, outputs, inputs], with biases [experts, outputs], multiplied by one kernel."""

    def __init__(
        self, shape: LinearShape, state: Mapping[str, Tensor], first: int, runtime: CudaRuntime, tile: dict[str, int]
    ) -> None:
        """tile: rows, columns and inputs of a program; that of single weights, so that a row has the same bits."""
        super().__init__(state, first)
        self._shape, self._runtime, self._tile = shape, runtime, tile
        self._weights, self._biases = state["weight"].contiguous(), state.get("bias")

    def __call__(self, x: Tensor, routing: Routing, *, of_tokens: bool, in_float32: bool = False) -> Tensor:
        x = x if x.stride(-1) == 1 else x.contiguous()
        pairs, shape = len(routing.order), self._shape
        width = shape.outputs // 2 if shape.is_gated else shape.outputs
        dtype = torch.float32 if in_float32 else x.dtype
        has_all = self.experts == len(routing.starts) - 1
        out = (torch.empty if has_all else torch.zeros)((pairs, width), dtype=dtype, device=x.device)
        has_many = pairs >= _MANY * self.experts and not self._runtime.is_invariant
        tile: dict[str, Any] = LARGE if has_many else self._tile
        # an expert has at most one tile that is not full
        num_tiles = pairs // tile["BM"] + min(pairs, self.experts)
        self._runtime.launch(
            "experts.experts",
            (num_tiles, -(-width // tile["BN"])),
            *(x, self._weights, x if self._biases is None else self._biases),
            *(routing.order, routing.starts[self.first :], out),
            *(x.stride(0), len(x), self.experts, shape.outputs, shape.inputs),
            E=power_of_2(self.experts),
            TOP_K=routing.weights.shape[1] if of_tokens else 0,
            HAS_BIAS=self._biases is not None,
            IS_GATED=shape.is_gated,
            TYPE=compute_type(x),
            **tile,
        )
        return out
