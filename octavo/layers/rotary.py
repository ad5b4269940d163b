"""The layer that rotates queries and keys by their positions."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.attention.metadata import ModelInput
from octavo.layers.layer import Binding, Layer
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import Rope


class Rotary(Layer):
    """Rotates queries and keys by their positions, after the per-head norms of the models that have them."""

    def __init__(self, rope: Rope) -> None:
        super().__init__()
        self.rope = rope
        self._table: Tensor
        self._query_table: Tensor

    def forward(
        self, q: Tensor, k: Tensor, batch: ModelInput, norms: tuple[RMSNorm, RMSNorm] | None = None
    ) -> tuple[Tensor, Tensor]:
        """q [tokens, heads, dim], k [tokens, kv_heads, dim] → the same shapes; `norms` are those of q and k."""
        weights: tuple[Tensor | None, Tensor | None, tuple[float, float]] = (None, None, (0.0, 0.0))
        if norms is not None:
            weights = norms[0].weight, norms[1].weight, (norms[0].eps, norms[0].offset)
        positions, table, rest = batch.positions, self._table, (*weights, self.rope.interleaved)
        if batch.rope_positions is not None:
            positions, table = self._of_images(batch.rope_positions, batch)
        elif self._query_table is not table:
            q, _ = self.ops.rotary(q, k[:, :0], positions, self._query_table, *rest)
            _, k = self.ops.rotary(q[:, :0], k, positions, table, *rest)
            return q, k
        q, k = self.ops.rotary(q, k, positions, table, *rest)
        return q, k

    def _of_images(self, positions: Tensor, batch: ModelInput) -> tuple[Tensor, Tensor]:
        """Return places in a table of this step's tokens, and that table, which all layers share."""
        step = batch.attention[0]
        places = step.once("places", lambda: torch.arange(positions.shape[1], device=positions.device))
        return places, step.once(self.rope, lambda: self.rope.table_of(self._table, positions))

    def bind(self, binding: Binding) -> None:
        """Store the operators, and the tables that all layers with these frequencies share."""
        super().bind(binding)
        sizes = binding.max_positions, binding.max_model_len
        self._table = binding.once(self.rope, lambda: self.rope.table(binding.ops, *sizes, binding.device))
        self._query_table = binding.once((self.rope, "queries"), lambda: self.rope.query_table(self._table))
