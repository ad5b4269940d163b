"""The layer that rotates queries and keys by their positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
        self._rotary: Callable[..., Any]
        self._table: Tensor

    def forward(
        self, q: Tensor, k: Tensor, batch: ModelInput, norms: tuple[RMSNorm, RMSNorm] | None = None
    ) -> tuple[Tensor, Tensor]:
        """q [tokens, heads, dim], k [tokens, kv_heads, dim] → the same shapes; `norms` are those of q and k."""
        if norms is None:
            q, k = self._rotary(q, k, batch.positions, self._table, None, None, 0.0, self.rope.interleaved)
        else:
            q_norm, k_norm = norms
            q, k = self._rotary(
                q,
                k,
                batch.positions,
                self._table,
                q_norm.weight,
                k_norm.weight,
                q_norm.eps,
                self.rope.interleaved,
            )
        return q, k

    def bind(self, binding: Binding) -> None:
        """Store the operator, and the table that all layers with these frequencies share."""
        self._rotary = binding.ops.rotary
        self._table = binding.once(
            self.rope, lambda: self.rope.table(binding.ops, binding.max_positions, binding.device)
        )
