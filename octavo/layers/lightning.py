"""Lightning attention: linear attention whose state decays by a number that each head of each layer has once for all.

Source: https://arxiv.org/abs/2401.04658.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from octavo.attention.metadata import ModelInput
from octavo.distributed.mesh import Mesh
from octavo.layers.distance import alibi_slopes
from octavo.layers.elementwise import Elementwise
from octavo.layers.layer import Binding
from octavo.layers.linear import ColumnLinear, joined_linear
from octavo.layers.norm import WidthNorm
from octavo.layers.picked import Pick, PickedLinear
from octavo.layers.recurrent import RecurrentLayer, RecurrentSizes
from octavo.layers.turns import in_turns


def lightning_sizes(heads: int, dim: int) -> RecurrentSizes:
    """Return the sizes of heads whose queries, keys and values have `dim` elements, without a convolution."""
    return RecurrentSizes(heads, heads, dim, dim, taps=1)


class DecayingAttention(RecurrentLayer):
    """Linear attention as Mamba2's scan computes it with steps of 1.

    `strength` is the factor of the slopes by which the logarithms of states fall: those of ALiBi.
    """

    def __init__(self, sizes: RecurrentSizes, mesh: Mesh, strength: float) -> None:
        super().__init__((), sizes.heads, sizes.rows(mesh, of_keys=False))
        self.sizes = sizes.share(mesh)
        self._slopes = [strength * slope for slope in alibi_slopes(sizes.heads)[self._rows]]

    def bind(self, binding: Binding) -> None:
        """Store the operators, and the numbers of the scan: nothing is added to steps, nor to its results."""
        super().bind(binding)
        logs = torch.tensor([math.log(each) for each in self._slopes], device=binding.device)
        self._numbers = logs, torch.zeros_like(logs), torch.zeros_like(logs)

    def scan(self, q: Tensor, k: Tensor, v: Tensor, batch: ModelInput) -> Tensor:
        """q, k, v [tokens, heads, dim] → the same shape."""
        states, metadata = self.states(batch)
        # within these limits every step is 1
        others, steps = (self._numbers, (1.0, 1.0), states), v.flatten(1)[:, : v.shape[1]]
        return in_turns(self.ops.mamba2_scan, (q, k, v, steps), others, metadata)


class LightningAttention(DecayingAttention):
    """MiniMax's: SiLU of queries, keys and values before, a norm over all heads and a gate behind."""

    def __init__(self, sizes: RecurrentSizes, hidden: int, mesh: Mesh, strength: float) -> None:
        super().__init__(sizes, mesh, strength)
        rows, dim, width = self._rows, sizes.value_dim, sizes.value_size
        picks = [
            Pick("qkv_proj", 3 * width, list(_parts(range(rows.start, rows.stop), dim, each))) for each in range(3)
        ]
        self.in_proj = PickedLinear(hidden, picks)
        self.norm = WidthNorm(sizes.heads, dim, 1e-6, mesh, (rows.start * dim, self.sizes.value_size))
        self.output_gate = ColumnLinear(hidden, width, mesh)
        self.gate = Elementwise("gated_by_sigmoid")
        self.out_proj = joined_linear(width, hidden, mesh)

    def forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        mixed = self.in_proj(x)
        mixed = self.gate(mixed, mixed)  # SiLU
        q, k, v = (each.view(len(x), self.sizes.heads, self.sizes.value_dim) for each in mixed.chunk(3, dim=1))
        normed = self.norm(self.scan(q, k, v, batch)).flatten(1)
        return self.out_proj(self.gate(normed, self.output_gate(x)))


def _parts(heads: Iterable[int], dim: int, part: int) -> Iterable[slice]:
    """Return the rows of the queries (0), keys (1) or values (2) of heads, which are stored side by side for each
    head."""
    for head in heads:
        start = (3 * head + part) * dim
        yield slice(start, start + dim)
