"""Layers whose memory of a sequence is a state of one size: gated delta rule, Mamba2, and a short convolution alone.

Ranks share the heads, and keys and queries with them, as they share those of attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn

from octavo.attention.metadata import AttentionMetadata, ModelInput
from octavo.core.model_shape import State
from octavo.distributed.mesh import Mesh
from octavo.layers.heads import Heads
from octavo.layers.layer import Binding, CachedLayer, Layer, TensorSlot
from octavo.layers.linear import joined_linear
from octavo.layers.picked import Pick, PickedLinear
from octavo.layers.turns import in_turns


@dataclass(frozen=True, slots=True)
class RecurrentSizes:
    """`heads` of values share `key_heads` of keys and queries; the convolution before them sees `taps` tokens."""

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def key_size(self) -> int:
        """Width of all keys, and of all queries."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Width of all values."""
        return self.heads * self.value_dim

    @property
    def channels(self) -> int:
        """Width of the convolution's input: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    def share(self, mesh: Mesh) -> RecurrentSizes:
        """Return this rank's heads. Raises ConfigError where the ranks cannot share the heads."""
        heads = Heads(self.heads, self.key_heads, 1).share(mesh)
        return RecurrentSizes(heads.query, heads.kv, self.key_dim, self.value_dim, self.taps)

    def state(self, mesh: Mesh) -> State:
        """Return what a rank keeps: the tail of the convolution, and a matrix for each head."""
        own = self.share(mesh)
        return State((own.taps - 1) * own.channels + own.heads * own.key_dim * own.value_dim)

    def rows(self, mesh: Mesh, *, of_keys: bool, width: int = 1, start: int = 0) -> slice:
        """Return this rank's part of a section from `start` on, which has `width` elements per head."""
        heads = Heads(self.heads, self.key_heads, width)
        first, length = heads.kv_share(mesh) if of_keys else heads.query_share(mesh)
        return slice(start + first, start + first + length)


@dataclass(frozen=True, slots=True)
class ConvolutionSizes:
    """A convolution alone: `channels`, and the `taps` tokens that it sees."""

    channels: int
    taps: int

    def state(self, mesh: Mesh) -> State:
        """Return what a rank keeps: the tail of its channels."""
        return State((self.taps - 1) * mesh.share(self.channels)[1])


class ShortConvolution(Layer):
    """A causal convolution of each channel, stored as [channels, 1, taps]; `own` are this rank's channels, in order.

    `reads` names tensors beside the layer that hold so many of the channels each; else one tensor holds all.
    """

    def __init__(
        self,
        channels: int,
        own: Sequence[slice],
        taps: int,
        *,
        bias: bool,
        reads: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        assert not (bias and reads), "no family has biases in several tensors"
        super().__init__()
        count = sum(each.stop - each.start for each in own)
        self.weight = nn.Parameter(torch.empty(taps, count), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(count), requires_grad=False) if bias else None
        self._channels, self._own, self._reads = channels, own, reads

    def forward(
        self, x: Tensor, states: Tensor, metadata: AttentionMetadata, gates: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """x [tokens, channels] → the same shape; `states` and `gates` are those of the operator."""

        if gates is None:
            return in_turns(self.ops.short_convolution, (x,), (self.weight, self.bias, states), metadata)

        def run(x: Tensor, before: Tensor, after: Tensor, rows: AttentionMetadata) -> Tensor:
            return self.ops.short_convolution(x, self.weight, self.bias, states, rows, (before, after))

        return in_turns(run, (x, *gates), (), metadata)

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        first, beside = 0, path.removesuffix(path.rpartition(".")[2])
        for name, count in self._reads.items():
            placed = self._placed(first, count)
            fill, parts = partial(self._fill_part, placed), tuple((rows,) for rows, _ in placed)
            yield TensorSlot(f"{beside}{name}.weight", (count, 1, len(self.weight)), fill, parts=parts)
            first += count
        if self._reads:
            return
        for name, _ in self.named_parameters(recurse=False):
            inner = (1, self.weight.shape[0]) if name == "weight" else ()
            parts = tuple((each,) for each in self._own)
            yield TensorSlot(f"{path}.{name}", (self._channels, *inner), partial(self._fill, name), parts=parts)

    def _placed(self, first: int, count: int) -> list[tuple[slice, int]]:
        """Return this rank's rows of a tensor of the `count` channels from `first` on, and their places."""
        found, target = [], 0
        for own in self._own:
            start, stop = max(own.start, first), min(own.stop, first + count)
            if start < stop:
                found.append((slice(start - first, stop - first), target + start - own.start))
            target += own.stop - own.start
        return found

    def _fill_part(self, placed: Sequence[tuple[slice, int]], stored: Tensor) -> None:
        room = self.room("weight", stored.device)
        for rows, target in placed:
            room[:, target : target + rows.stop - rows.start].copy_(stored[rows].squeeze(1).t())

    def _fill(self, name: str, stored: Tensor) -> None:
        own = torch.cat([stored[each] for each in self._own])
        self.hold(name, own.squeeze(1).t() if name == "weight" else own)


class GatedNorm(Layer):
    """The RMS norm of each group of a row [tokens, dim], before a gate, or after it where `is_gate_first`.

    The weight is one for all groups, or that of the whole row, of which this rank has `rows`.
    """

    def __init__(self, size: int, rows: slice, group: int, eps: float, *, is_gate_first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows.stop - rows.start), requires_grad=False)
        self._size, self._rows, self._numbers = size, rows, (eps, group, is_gate_first)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x and gate [tokens, dim] → the same shape."""
        return self.ops.gated_rms_norm(x, gate, self.weight, *self._numbers)

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        yield self.rows_slot(f"{path}.weight", (self._size,), self._rows)


class SigmoidGatedNorm(GatedNorm):
    """A norm of each group of a row, with one weight for all groups, whose gate is a sigmoid."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x and gate [tokens, dim] → the same shape."""
        eps, group, _ = self._numbers
        return self.ops.gated_by_sigmoid(self.ops.rms_norm(x.view(-1, group), self.weight, eps).view(x.shape), gate)


class RecurrentLayer(CachedLayer):
    """A layer with a state, and with numbers of each head in float32, `rows` of which this rank has."""

    parameter_dtype = torch.float32

    def __init__(self, numbers: Sequence[str], count: int, rows: slice) -> None:
        super().__init__()
        self._count, self._rows = count, rows
        for name in numbers:
            self.register_parameter(name, nn.Parameter(torch.empty(rows.stop - rows.start), requires_grad=False))

    def states(self, batch: ModelInput) -> tuple[Tensor, AttentionMetadata]:
        """Return the states [blocks, values] of all blocks, and where those of this step's rows are."""
        return batch.kv_caches[self.cache_index][0], batch.attention[self.cache_group]

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        for name, _ in self.named_parameters(recurse=False):
            yield self.rows_slot(f"{path}.{name}", (self._count,), self._rows, name)


def convolution(sizes: RecurrentSizes, mesh: Mesh, reads: Mapping[str, int]) -> ShortConvolution:
    """Make the convolution of queries, keys and values. reads: as of `ShortConvolution`."""
    keys = partial(sizes.rows, mesh, of_keys=True, width=sizes.key_dim)
    values = sizes.rows(mesh, of_keys=False, width=sizes.value_dim, start=2 * sizes.key_size)
    channels = keys(), keys(start=sizes.key_size), values
    return ShortConvolution(sizes.channels, channels, sizes.taps, bias=False, reads=reads)


class GatedDeltaNet(RecurrentLayer):
    """The gated delta rule behind a short convolution, and a gated norm of each head.

    `picks` makes the picks of the input's projection: queries, keys, values, gate, beta, step. `factor`: of beta's
    sigmoid. `convolutions` names the tensors of the convolution with their channels, where there are several.
    """

    def __init__(
        self,
        sizes: RecurrentSizes,
        hidden: int,
        eps: float,
        mesh: Mesh,
        picks: Sequence[Pick],
        *,
        factor: float = 1.0,
        convolutions: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        super().__init__(("A_log", "dt_bias"), sizes.heads, sizes.rows(mesh, of_keys=False))
        self.sizes = own = sizes.share(mesh)
        self.in_proj = PickedLinear(hidden, picks)
        self.conv1d = convolution(sizes, mesh, convolutions)
        dim, self._factor = sizes.value_dim, factor
        self.gated_norm = GatedNorm(dim, slice(0, dim), dim, eps, is_gate_first=False)
        self.out_proj = joined_linear(sizes.value_size, hidden, mesh)
        self._tail = (own.taps - 1) * own.channels

    def bind(self, binding: Binding) -> None:
        """Store the operators, and the factor for each head."""
        super().bind(binding)
        ones = torch.ones(self.sizes.heads, device=binding.device)
        self._factors = () if self._factor == 1.0 else (ones * self._factor,)

    def forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        states, metadata = self.states(batch)
        own, tokens = self.sizes, len(x)
        mixed, gate, beta, step = torch.split(
            self.in_proj(x), [own.channels, own.value_size, own.heads, own.heads], dim=1
        )
        mixed = self.conv1d(mixed, states[:, : self._tail], metadata)
        q, k, v = torch.split(mixed, [own.key_size, own.key_size, own.value_size], dim=1)
        q, k = (each.view(tokens, own.key_heads, own.key_dim) for each in (q, k))
        v = v.view(tokens, own.heads, own.value_dim)
        numbers = self.A_log, self.dt_bias, *self._factors
        out = in_turns(self.ops.gated_delta_rule, (q, k, v, step, beta), (numbers, states[:, self._tail :]), metadata)
        return self.out_proj(self.gated_norm(out.view(tokens, -1), gate))


@dataclass(frozen=True, slots=True)
class MambaOptions:
    """The options in which families with Mamba2 differ."""

    bias: bool = False
    convolution_bias: bool = True
    out_bias: bool = False
    limits: tuple[float, float] = (0.0, float("inf"))
    """The smallest and the largest time step."""
    factors: tuple[float, ...] = (1.0,) * 5
    """The factors of gate, x, B, C and step after the projection."""
    norm_groups: int | None = 1
    """The number of parts of a row that are normalised each; None without a norm."""
    is_norm_first: bool = False
    """Whether the norm comes before the gate."""


class Mamba2(RecurrentLayer):
    """Mamba2's scan behind a short convolution, and a gated norm; C, B and x are queries, keys and values."""

    def __init__(
        self, sizes: RecurrentSizes, hidden: int, eps: float, mesh: Mesh, options: MambaOptions | None = None
    ) -> None:
        super().__init__(("A_log", "dt_bias", "D"), sizes.heads, sizes.rows(mesh, of_keys=False))
        options = options or MambaOptions()
        self.sizes = own = sizes.share(mesh)
        keys = partial(sizes.rows, mesh, of_keys=True, width=sizes.key_dim)
        values = partial(sizes.rows, mesh, of_keys=False, width=sizes.value_dim)
        inner, total = sizes.value_size, sizes.value_size + sizes.channels + sizes.heads
        sections = (
            values(),
            values(start=inner),
            keys(start=2 * inner),
            keys(start=2 * inner + sizes.key_size),
            sizes.rows(mesh, of_keys=False, start=inner + sizes.channels),
        )
        picks = [
            Pick("in_proj", total, (rows,), factor) for rows, factor in zip(sections, options.factors, strict=True)
        ]
        self.in_proj = PickedLinear(hidden, picks, bias=options.bias)
        channels = values(), keys(start=inner), keys(start=inner + sizes.key_size)
        self.conv1d = ShortConvolution(sizes.channels, channels, sizes.taps, bias=options.convolution_bias)
        self.norm: GatedNorm | None = None
        if options.norm_groups is not None:
            mesh.share(options.norm_groups, "groups of the norm behind Mamba2")
            is_gate_first = not options.is_norm_first
            self.norm = GatedNorm(inner, values(), inner // options.norm_groups, eps, is_gate_first=is_gate_first)
        self.out_proj = joined_linear(inner, hidden, mesh, bias=options.out_bias)
        self._limits, self._tail = options.limits, (own.taps - 1) * own.channels

    def forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        states, metadata = self.states(batch)
        own, tokens = self.sizes, len(x)
        gate, mixed, step = torch.split(self.in_proj(x), [own.value_size, own.channels, own.heads], dim=1)
        mixed = self.conv1d(mixed, states[:, : self._tail], metadata)
        v, k, q = torch.split(mixed, [own.value_size, own.key_size, own.key_size], dim=1)
        q, k = (each.view(tokens, own.key_heads, own.key_dim) for each in (q, k))
        v, numbers = v.view(tokens, own.heads, own.value_dim), (self.A_log, self.dt_bias, self.D)
        others = numbers, self._limits, states[:, self._tail :]
        out = in_turns(self.ops.mamba2_scan, (q, k, v, step), others, metadata).view(tokens, -1)
        out = self.ops.silu_times(gate, out) if self.norm is None else self.norm(out, gate)
        return self.out_proj(out)


class GatedConvolution(RecurrentLayer):
    """A short convolution between two gates, over a projection to before | after | input. Ranks share the channels."""

    def __init__(self, sizes: ConvolutionSizes, mesh: Mesh, *, bias: bool) -> None:
        hidden, taps = sizes.channels, sizes.taps
        start, length = mesh.share(hidden)
        super().__init__((), hidden, slice(start, start + length))
        rows = [slice(part * hidden + start, part * hidden + start + length) for part in range(3)]
        self.in_proj = PickedLinear(hidden, [Pick("in_proj", 3 * hidden, rows)], bias=bias)
        self.conv = ShortConvolution(hidden, (self._rows,), taps, bias=bias)
        self.out_proj = joined_linear(hidden, hidden, mesh, bias=bias)

    def forward(self, x: Tensor, batch: ModelInput) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        before, after, inner = self.in_proj(x).chunk(3, dim=1)
        return self.out_proj(self.conv(inner, *self.states(batch), gates=(before, after)))
