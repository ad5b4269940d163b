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
        if not self.shape.is_gated:
            return self._product(x, x.dtype, add)
        product = self.in_float32(x)
        return silu_and_mul(product if add is None else product + add).to(x.dtype)

    def in_float32(self, x: Tensor) -> Tensor:
        return self._product(x, torch.float32, None)

    def _product(self, x: Tensor, dtype: torch.dtype, add: Tensor | None) -> Tensor:
        """Let each part write its columns of the product, without the gate."""
        out = x.new_empty((x.shape[0], self.shape.outputs), dtype=dtype)
        start = 0
        for part in self._parts:
            stop = start + part.shape.outputs
            part.write(x, out[:, start:stop], None if add is None else add[:, start:stop])
            start = stop
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows of the part that has each."""
        found, start = ids.new_zeros((len(ids), self.shape.inputs), dtype=self.shape.dtype), 0
        for part in self._parts:
            own = (ids >= start) & (ids < start + part.shape.outputs)
            found[own] = part.rows(ids[own] - start)
            start += part.shape.outputs
        return found
