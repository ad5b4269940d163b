"""Kimi's delta attention: the gated delta rule with a decay for each element of keys.

Source: https://arxiv.org/abs/2510.26692.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.distributed.mesh import Mesh
from octavo.layers.elementwise import Elementwise
from octavo.layers.layer import TensorSlot
from octavo.layers.linear import ColumnLinear, joined_linear
from octavo.layers.norm import RMSNorm
from octavo.layers.picked import Pick, PickedLinear
from octavo.layers.recurrent import RecurrentLayer, RecurrentSizes, convolution
from octavo.layers.turns import in_turns


class KimiDeltaAttention(RecurrentLayer):
    """The gated delta rule with a decay for each element of keys, within a `bound` where one is given
    (`bounded_delta_rule`).

    of_low_rank: which of decays (`f`) and gates (`g`) are made by products of low rank, and not by one product.
    has_flat_logs: whether A_log is stored as [heads]; None where a bound says so.
    """

    def __init__(
        self,
        sizes: RecurrentSizes,
        hidden: int,
        eps: float,
        mesh: Mesh,
        *,
        convolutions: Mapping[str, int],
        bound: float | None = None,
        of_low_rank: str = "fg",
        has_flat_logs: bool | None = None,
    ) -> None:
        super().__init__(("A_log",), sizes.heads, sizes.rows(mesh, of_keys=False))
        self.sizes = own = sizes.share(mesh)
        self._wide = wide = sizes.rows(mesh, of_keys=True, width=sizes.key_dim)
        self.dt_bias = nn.Parameter(torch.empty(own.key_size), requires_grad=False)
        self._bound, rank = bound, sizes.key_dim
        self._has_flat_logs = bound is not None if has_flat_logs is None else has_flat_logs
        picks = [Pick(f"{each}_proj", sizes.key_size, (wide,)) for each in "qkv"]
        picks.append(Pick("b_proj", sizes.heads, (self._rows,)))
        for each in "fg":
            low, whole = (f"{each}_a_proj", rank, (slice(0, rank),)), (f"{each}_proj", sizes.key_size, (wide,))
            picks.append(Pick(*(low if each in of_low_rank else whole)))
        self.f_b_proj = ColumnLinear(rank, sizes.key_size, mesh) if "f" in of_low_rank else None
        self.g_b_proj = ColumnLinear(rank, sizes.value_size, mesh) if "g" in of_low_rank else None
        self.in_proj = PickedLinear(hidden, picks)
        self.conv1d = convolution(sizes, mesh, convolutions)
        self.o_norm, self.gate = RMSNorm(sizes.value_dim, eps), Elementwise("gated_by_sigmoid")
        self.o_proj = joined_linear(sizes.value_size, hidden, mesh)
        self._tail, self._widths = (
            (own.taps - 1) * own.channels,
            [own.channels, own.heads, *(each.length for each in picks[-2:])],
        )

    def forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        states, metadata = self.states(batch)
        own, tokens = self.sizes, len(x)
        mixed, beta, step, gate = torch.split(self.in_proj(x), self._widths, dim=1)
        mixed = self.conv1d(mixed, states[:, : self._tail], metadata)
        q, k, v = (each.view(tokens, own.heads, -1) for each in torch.split(mixed, own.key_size, dim=1))
        step = step if self.f_b_proj is None else self.f_b_proj(step)
        gate = gate if self.g_b_proj is None else self.g_b_proj(gate)
        numbers: tuple[Any, ...] = self.A_log, self.dt_bias
        rule = self.ops.gated_delta_rule
        if self._bound is not None:
            numbers, rule = (*numbers, self._bound), self.ops.bounded_delta_rule
        out = in_turns(rule, (q, k, v, step, beta), (numbers, states[:, self._tail :]), metadata)
        return self.o_proj(self.gate(self.o_norm(out).view(tokens, -1), gate))

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        rows, wide, every = self._rows, self._wide, slice(None)
        is_plain, biases = self._has_flat_logs, (self._count * self.sizes.key_dim,)
        logs = (self._count,) if is_plain else (1, 1, self._count, 1)

        def fill(stored: Tensor) -> None:
            self.hold("A_log", stored.flatten()[rows])

        yield TensorSlot(f"{path}.A_log", logs, fill, parts=((rows,) if is_plain else (every, every, rows),))
        yield self.rows_slot(f"{path}.dt_bias", biases, wide, "dt_bias")
