"""One weight whose outputs several formats hold."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from octavo.ops.elementwise import silu_and_mul
from octavo.ops.prepare_linear import LinearShape, PreparedLinear


class SideBySide(PreparedLinear):
    """The outputs of `parts`, one after the other; names in `state` end with the key of their part."""

    def __init__(self, shape: LinearShape, parts: Mapping[str, PreparedLinear]) -> None:
        super().__init__(
            shape, {name + key: each for key, part in parts.items() for name, each in part.state().items()}
        )
        self._parts = tuple(parts.values())

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        if not self.shape.is_gated and add is None:
            return torch.cat([part(x) for part in self._parts], 1)
        product = torch.cat([part.in_float32(x) for part in self._parts], 1)
        product = product if add is None else product + add
        return (silu_and_mul(product) if self.shape.is_gated else product).to(x.dtype)

    def in_float32(self, x: Tensor) -> Tensor:
        return torch.cat([part.in_float32(x) for part in self._parts], 1)

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows of the part that has each."""
        found, start = ids.new_zeros((len(ids), self.shape.inputs), dtype=self.shape.dtype), 0
        for part in self._parts:
            own = (ids >= start) & (ids < start + part.shape.outputs)
            found[own] = part.rows(ids[own] - start)
            start += part.shape.outputs
        return found
