"""Products with weights that checkpoints store as floats of 8 bits (FP8, E4M3) with scales."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from octavo.devices.cuda.experts import GroupedStack
from octavo.devices.cuda.ops.linear import InvariantLinear, multiplied
from octavo.devices.cuda.runtime import CudaRuntime
from octavo.ops.coded import CodedFormat, CodeSpec
from octavo.ops.codes import NotFinite
from octavo.ops.experts import PreparedStack
from octavo.ops.prepare_linear import LinearShape, PreparedLinear


class Float8Linear(InvariantLinear):
    """State: `codes` and `scales` of the spec, perhaps `bias`. Results have the bits of the plain weight: the kernel
    rounds each weight to the type of the model."""

    def __init__(self, spec: CodeSpec, shape: LinearShape, state: Mapping[str, Tensor], runtime: CudaRuntime) -> None:
        super().__init__(shape, state, runtime)
        self._spec, self._given = spec, {**state, "weight": runtime.floats(state["codes"])}

    def by_head(self, x: Tensor, outputs: int) -> Tensor:
        return PreparedLinear.by_head(self, x, outputs)

    def rows(self, ids: Tensor) -> Tensor:
        return self._spec.dequantized({name: self._state[name][ids] for name in ("codes", "scales")}).to(
            self.shape.dtype
        )

    def _product(self, x: Tensor, dtype: torch.dtype, add: Tensor | None) -> Tensor:
        group, gated = self._spec.group or 1, self.shape.is_gated
        return multiplied(
            self._runtime, x, self._given, dtype, add=add, gated=gated, chunks=self._chunks(), group=group
        )


class Float8Format(CodedFormat):
    """Keeps codes as they are, and refuses NaN, which not all kernels would decode."""

    def __init__(self, runtime: CudaRuntime, spec: CodeSpec) -> None:
        super().__init__(spec)
        self._runtime = runtime

    def pack_into(
        self, state: Mapping[str, Tensor], weight: Mapping[str, Tensor], bias: Tensor | None, *, gated: bool
    ) -> None:
        super().pack_into(state, weight, bias, gated=gated)
        if (spoilt := (state["codes"] & 127 == 127).any(1)).any():
            raise NotFinite(int(spoilt.nonzero()[0]))

    def restore_stack(self, shape: LinearShape, state: Mapping[str, Tensor], first: int = 0) -> PreparedStack:
        return GroupedStack(shape, state, first, self._runtime, self.spec.group or 1)

    def restore(self, shape: LinearShape, state: Mapping[str, Tensor]) -> PreparedLinear:
        return Float8Linear(self.spec, shape, state, self._runtime)
