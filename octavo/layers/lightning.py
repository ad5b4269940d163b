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


class LightningAttention(RecurrentLayer):
    """SiLU of queries, keys and values, Mamba2's scan with steps of 1, a norm over all heads, and a gate.

    `strength` is the factor of the slopes by which the logarithms of states fall: those of ALiBi.
    """

    def __init__(self, sizes: RecurrentSizes, hidden: int, mesh: Mesh, strength: float) -> None:
        rows, dim, width = sizes.rows(mesh, of_keys=False), sizes.value_dim, sizes.value_size
        super().__init__((), sizes.heads, rows)
        self._slopes = [strength * slope for slope in alibi_slopes(sizes.heads)[rows]]
        picks = [
            Pick("qkv_proj", 3 * width, list(_parts(range(rows.start, rows.stop), dim, each))) for each in range(3)
        ]
        self.in_proj = PickedLinear(hidden, picks)
        self._own = sizes.share(mesh)
        share = rows.start * dim, self._own.value_size
        self.norm = WidthNorm(sizes.heads, dim, 1e-6, mesh, share)
        self.output_gate = ColumnLinear(hidden, width, mesh)
        self.gate = Elementwise("gated_by_sigmoid")
        self.out_proj = joined_linear(width, hidden, mesh)

    def bind(self, binding: Binding) -> None:
        """Store the operators, and the numbers of the scan: nothing is added to steps, nor to its results."""
        super().bind(binding)
        logs = torch.tensor([math.log(each) for each in self._slopes], device=binding.device)
        self._numbers = logs, torch.zeros_like(logs), torch.zeros_like(logs)

    def forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        states, metadata = self.states(batch)
        heads, dim = self._own.heads, self._own.value_dim
        mixed = self.in_proj(x)
        mixed = self.gate(mixed, mixed)  # SiLU
        q, k, v = (each.view(len(x), heads, dim) for each in mixed.chunk(3, dim=1))
        # within these limits every step is 1
        others = self._numbers, (1.0, 1.0), states
        out = in_turns(self.ops.mamba2_scan, (q, k, v, mixed[:, :heads]), others, metadata)
        projected: Tensor = self.out_proj(self.gate(self.norm(out).flatten(1), self.output_gate(x)))
        return projected


def _parts(heads: Iterable[int], dim: int, part: int) -> Iterable[slice]:
    """Return where the queries (0), keys (1) or values (2) of heads are stored, which have all three side by side."""
    for head in heads:
        start = (3 * head + part) * dim
        yield slice(start, start + dim)
