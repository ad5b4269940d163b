"""Layers that rotate queries and keys by their positions, or multiply queries by factors of their positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.layers.layer import Binding, Layer, TensorSlot
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import Rope
from octavo.ops.rotary import Rotation


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
        rotation = self.rotation(batch, norms)
        turned = rotation.of(self.ops.rotary, q, k)
        if batch.rope_positions is not None and self.rope.second_axes:
            table, half = self._table_of_images(batch.rope_positions, batch, is_second=True), self.rope.dim // 2
            others = rotation._replace(q_table=table, k_table=table).of(self.ops.rotary, q, k)
            for each, other in zip(turned, others, strict=True):
                each[..., half : self.rope.dim] = other[..., half : self.rope.dim]
        return turned

    def at(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x [vectors, heads, dim] to these positions, int64 [vectors]."""
        return self._turned(x, positions, self._table)

    def back(self, x: Tensor, batch: ModelInput) -> Tensor:
        """Rotate x [tokens, heads, dim] by the positions of tokens in the other direction."""
        step, half, device = batch.attention[0], self.rope.dim // 2, x.device

        def tables() -> tuple[Tensor, Tensor]:
            table = self._table[batch.positions]
            places = torch.arange(len(table), device=device)
            return places, torch.cat((table[:, :half], -table[:, half:]), 1)

        return self._turned(x, *step.once((self.rope, "back"), tables))

    def _turned(self, x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        none = x.new_empty((len(x), 0, x.shape[2]))
        return self.ops.rotary(x, none, positions, table, None, None, (0.0, 0.0), self.rope.interleaved)[0]

    def rotation(self, batch: ModelInput, norms: tuple[RMSNorm, RMSNorm] | None = None) -> Rotation:
        """Return what rotates the queries and keys of a step."""
        positions, q_table, k_table = batch.positions, self._query_table, self._table
        if batch.rope_positions is not None:
            positions, k_table = self._of_images(batch.rope_positions, batch)
            q_table = k_table
        if norms is None:
            return Rotation(positions, q_table, k_table, None, None, (0.0, 0.0), self.rope.interleaved)
        weights = norms[0].weight, norms[1].weight, (norms[0].eps, norms[0].offset)
        return Rotation(positions, q_table, k_table, *weights, self.rope.interleaved)

    def _of_images(self, positions: Tensor, batch: ModelInput) -> tuple[Tensor, Tensor]:
        """Return places in a table of this step's tokens, and that table, which all layers share."""
        step = batch.attention[0]
        places = step.once("places", lambda: torch.arange(positions.shape[1], device=positions.device))
        return places, self._table_of_images(positions, batch)

    def _table_of_images(self, positions: Tensor, batch: ModelInput, *, is_second: bool = False) -> Tensor:
        return batch.attention[0].once(
            (self.rope, is_second), lambda: self.rope.table_of(self._table, positions, is_second=is_second)
        )

    def bind(self, binding: Binding) -> None:
        """Store the operators, and the tables that all layers with these frequencies share."""
        super().bind(binding)
        sizes = binding.max_positions, binding.max_model_len
        self._table = binding.once(self.rope, lambda: self.rope.table(binding.ops, *sizes, binding.device))
        self._query_table = binding.once((self.rope, "queries"), lambda: self.rope.query_table(self._table))


class LearnedRotary(Rotary):
    """Rotates at frequencies that are multiplied with exponentials of learned numbers, float32 [dim / 2].

    They are stored once for a model, as `rotary_emb.alpha`: its layers share this one.
    """

    parameter_dtype = torch.float32

    def __init__(self, rope: Rope) -> None:
        super().__init__(rope)
        self.alpha = nn.Parameter(torch.empty(rope.dim // 2), requires_grad=False)
        self._sizes: tuple[int, int]

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        yield TensorSlot("rotary_emb.alpha", tuple(self.alpha.shape), partial(self.hold, "alpha"))

    def bind(self, binding: Binding) -> None:
        """Make a table of the plain frequencies, which `finish` writes over."""
        super().bind(binding)
        self._sizes = binding.max_positions, binding.max_model_len

    def finish(self) -> None:
        if not self.alpha.is_meta:
            # in place: recorded steps read this memory
            self._table.copy_(self.rope.table(self.ops, *self._sizes, self.alpha.device, self.alpha.exp()))

    def restore(self, state: Mapping[str, Tensor]) -> None:
        super().restore(state)
        self.finish()


class PositionScale(Layer):
    """Multiplies queries of each head with `scale · ln(position + 1) + bias`, in float32; `own` are this rank's heads.

    Source: "Scalable-Softmax", https://arxiv.org/abs/2501.19399.
    """

    parameter_dtype = torch.float32

    def __init__(self, num_heads: int, own: slice) -> None:
        super().__init__()
        self._num_heads, self._own = num_heads, own
        size = own.stop - own.start
        self.scale = nn.Parameter(torch.empty(size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False)
        self._logarithms: Tensor

    def forward(self, parts: tuple[Tensor, ...], batch: ModelInput) -> tuple[Tensor, ...]:
        """parts: of queries, each [tokens, heads, elements]; returns them in the same shapes."""
        rows = self._logarithms[batch.positions].unsqueeze(1)
        factors = (rows * self.scale + self.bias).unsqueeze(2)
        return tuple((each * factors).to(each.dtype) for each in parts)

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        for name in ("scale", "bias"):
            yield self.rows_slot(f"{path}.{name}", (self._num_heads,), self._own, name)

    def bind(self, binding: Binding) -> None:
        """Store the logarithms of all positions, which all layers share: from a table, one has the same bits in any
        step."""
        super().bind(binding)
        self._logarithms = binding.once(
            "logarithms of positions",
            lambda: torch.arange(1, binding.max_positions + 1, dtype=torch.float32).log().to(binding.device),
        )
