"""Mamba's mixer: a selective scan behind a short convolution, of whose output its step, B and C are made.

Ranks share the channels. Source: Gu and Dao, "Mamba", https://arxiv.org/abs/2312.00752.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.core.model_shape import State
from octavo.distributed.mesh import Mesh
from octavo.layers.layer import TensorSlot
from octavo.layers.linear import ColumnLinear, joined_linear
from octavo.layers.norm import RMSNorm
from octavo.layers.picked import Pick, PickedLinear
from octavo.layers.recurrent import RecurrentLayer, ShortConvolution
from octavo.layers.turns import in_turns


@dataclass(frozen=True, slots=True)
class SelectiveSizes:
    """`channels` with `state_size` numbers each, steps of so low a `rank`, and the `taps` tokens of the convolution."""

    channels: int
    state_size: int
    rank: int
    taps: int

    def state(self, mesh: Mesh) -> State:
        """Return what a rank keeps: the tail of the convolution, and the numbers of its channels."""
        return State((self.taps - 1 + self.state_size) * mesh.share(self.channels, "channels of Mamba")[1])


@dataclass(frozen=True, slots=True)
class SelectiveOptions:
    """What families with Mamba differ in.

    norm: makes the norms of step, B and C, given their widths. has_logs: rates are stored as A_log, else as A, which is
    their negative.
    """

    bias: bool = False
    convolution_bias: bool = True
    norm: Callable[[int], RMSNorm] | None = None
    has_logs: bool = True


class SelectiveMixer(RecurrentLayer):
    """The scan behind a short convolution, times the SiLU of a gate."""

    def __init__(self, sizes: SelectiveSizes, hidden: int, mesh: Mesh, options: SelectiveOptions) -> None:
        channels, size, rank = sizes.channels, sizes.state_size, sizes.rank
        start, length = mesh.share(channels, "channels of Mamba")
        rows = slice(start, start + length)
        super().__init__(("dt_bias", "D"), channels, rows)
        self.rates = nn.Parameter(torch.empty(size, length), requires_grad=False)
        gates = slice(channels + start, channels + start + length)
        self.in_proj = PickedLinear(hidden, [Pick("in_proj", 2 * channels, (rows, gates))], bias=options.bias)
        self.conv1d = ShortConvolution(channels, (rows,), sizes.taps, bias=options.convolution_bias)
        self._widths = [rank, size, size]
        self.x_proj = joined_linear(channels, sum(self._widths), mesh)
        self.dt_layernorm, self.b_layernorm, self.c_layernorm = map(options.norm or _no_norm, self._widths)
        self.dt_proj = ColumnLinear(rank, channels, mesh)
        self.out_proj = joined_linear(channels, hidden, mesh, bias=options.bias)
        self._has_logs, self._tail = options.has_logs, (sizes.taps - 1) * length

    def forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        states, metadata = self.states(batch)
        mixed, gate = self.in_proj(x).chunk(2, dim=1)
        mixed = self.conv1d(mixed, states[:, : self._tail], metadata)
        low_step, b, c = torch.split(self.x_proj(mixed), self._widths, dim=1)
        step, numbers = self.dt_proj(self.dt_layernorm(low_step)), (self.rates, self.dt_bias, self.D)
        b, c = self.b_layernorm(b), self.c_layernorm(c)
        others = numbers, states[:, self._tail :]
        out = in_turns(self.ops.selective_scan, (c, b, mixed, step), others, metadata)
        return self.out_proj(self.ops.silu_times(gate, out))

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        name, shape = f"{path}.{'A_log' if self._has_logs else 'A'}", (self._count, len(self.rates))
        yield TensorSlot(name, shape, self._fill_rates, parts=((self._rows,),))
        for name, stored_name in (("dt_bias", "dt_proj.bias"), ("D", "D")):
            yield self.rows_slot(f"{path}.{stored_name}", (self._count,), self._rows, name)

    def _fill_rates(self, stored: Tensor) -> None:
        own = stored[self._rows].float()
        self.hold("rates", (own.exp() if self._has_logs else -own).t())


def _no_norm(width: int) -> nn.Module:
    return nn.Identity()
