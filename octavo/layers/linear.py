"""Linear layers, cut by their outputs over the ranks of a mesh, or by their inputs where sums need not be exact.

Tensors that are multiplied with the same input are kept as one weight: `reads` names them, beside the layer in the
checkpoint's tree, in the order in which their outputs are wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.distributed.mesh import Mesh
from octavo.errors import ConfigError
from octavo.layers.elementwise import GATED
from octavo.layers.heads import Heads
from octavo.layers.layer import Filling, PreparedLayer, TensorSlot
from octavo.ops.prepare_linear import LinearShape
from octavo.quantization.method import Methods, columns_of, without_cut_floats


class ColumnLinear(PreparedLayer):
    """x [tokens, inputs] → [tokens, sum of this rank's shares of `sections`].

    `sections` are the output sizes that each are shared by the ranks as `share_of` says. `reads` names one tensor per
    section, or a single one that holds all of them stacked; by default the layer's own name. `transposed` is for
    checkpoints that store [inputs, outputs].
    """

    def __init__(
        self,
        inputs: int,
        sections: int | Sequence[int],
        mesh: Mesh,
        *,
        bias: bool = False,
        reads: Sequence[str] = (),
        transposed: bool = False,
        gated: bool = False,
        unbiased: Sequence[str] = (),
    ) -> None:
        """unbiased: those of `reads` that have no bias although the others have one."""
        self.sections = (sections,) if isinstance(sections, int) else tuple(sections)
        self.mesh = mesh
        shares = [self.share_of(section) for section in range(len(self.sections))]
        own, all_outputs = sum(length for _, length in shares), sum(self.sections)
        super().__init__(inputs, own, bias=bias, gated=gated, all_outputs=all_outputs)
        assert len(reads) in (0, 1, len(self.sections)), f"{reads} cannot fill {len(self.sections)} sections"
        self.reads = tuple(reads)
        self.transposed = transposed
        self._unbiased = frozenset(unbiased)

    def room(self, name: str, device: torch.device) -> Tensor:
        is_new, memory = self.get_parameter(name).is_meta, super().room(name, device)
        return memory.zero_() if is_new and self._unbiased and name == "bias" else memory

    def share_of(self, section: int) -> tuple[int, int]:
        """Return (start, length) of this rank's share of the outputs of a section."""
        return self.mesh.share(self.sections[section])

    def sources(self, path: str) -> list[tuple[str, int]]:
        return [(name, sum(each.length for each in group)) for name, _, group in self._stored(path)]

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        """Yield one tensor per read name and parameter."""
        stored = self._stored(path)
        for held in self.fillings():
            turned = self.transposed and held.name == "weight"
            for name, size, group in stored:
                if not held.start <= group[0].target < held.stop:
                    continue
                if held.name == "bias" and name.rpartition(".")[2] in self._unbiased:
                    continue
                fill = partial(self._fill, held, group, turned)
                parts = tuple(_part(each.rows, outputs_last=turned) for each in group)
                slot = self.slot(held, name, size, fill, parts)
                yield replace(slot, shape=slot.shape[::-1]) if turned else slot

    def _stored(self, path: str) -> list[tuple[str, int, list[_Placed]]]:
        """Return name and outputs of each stored weight, and this rank's share of them."""
        parent, _, own = path.rpartition(".")
        beside = f"{parent}." if parent else ""
        names = self.reads or (own,)
        is_stacked = len(names) < len(self.sections)
        placed: list[_Placed] = []
        start = target = 0
        for section, size in enumerate(self.sections):
            first, length = self.share_of(section)
            placed.append(_Placed((start if is_stacked else 0) + first, length, target))
            start, target = start + size, target + length
        if is_stacked:
            return [(f"{beside}{names[0]}", sum(self.sections), placed)]
        each = zip(names, self.sections, placed, strict=True)
        return [(f"{beside}{name}", size, [place]) for name, size, place in each]

    def _fill(self, held: Filling, group: list[_Placed], turned: bool, stored: Tensor) -> None:
        rows, num_outputs = stored.t() if turned else stored, held.stop - held.start
        if len(group) == 1 and group[0].length == num_outputs:
            rows = rows[group[0].rows]
        is_in_order = group[0].start <= group[-1].start
        if is_in_order and len(rows) == sum(each.length for each in group) == num_outputs:
            self.hold(held.key, rows)
            return
        room = self.room(held.key, stored.device)
        for each in group:
            room.narrow(0, each.target - held.start, each.length).copy_(rows[each.rows])


class _Placed(NamedTuple):
    """This rank's outputs of one section: from `start` of the stored tensor on, `length` of them, to `target`."""

    start: int
    length: int
    target: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.length)


def _part(outputs: slice, *, outputs_last: bool) -> tuple[slice, ...]:
    """Return the index of these outputs in a stored tensor."""
    return (slice(None), outputs) if outputs_last else (outputs,)


class GatedLinear(ColumnLinear):
    """x [tokens, inputs] → act(gate(x)) * up(x) [tokens, this rank's share of width], from one product.

    `activation` is a key of `GATED` with its `numbers`: of limited_swiglu and capped_swiglu the limit, of
    clamped_swiglu alpha and the limit.
    """

    def __init__(
        self,
        inputs: int,
        width: int,
        mesh: Mesh,
        *,
        bias: bool = False,
        reads: Sequence[str] = ("gate_proj", "up_proj"),
        activation: str = "silu",
        numbers: tuple[float, ...] = (),
    ) -> None:
        super().__init__(inputs, (width, width), mesh, bias=bias, reads=reads, gated=activation == "silu")
        self._act, self._numbers = GATED[activation], numbers

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, inputs] → [tokens, share of width]."""
        product: Tensor = self.prepared(x)
        return product if self._act is None else self._act(self.ops, product, *self._numbers)


class UpGateLinear(GatedLinear):
    """A `GatedLinear` of one stored tensor, in which the rows of `up` come before those of the gate."""

    def _stored(self, path: str) -> list[tuple[str, int, list[_Placed]]]:
        ((name, size, (gate, up)),) = super()._stored(path)
        half = size // 2
        return [(name, size, [gate._replace(start=gate.start + half), up._replace(start=up.start - half)])]


class InterleavedLinear(GatedLinear):
    """A `GatedLinear` of one stored tensor, in which the rows of the gate and of `up` alternate."""

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        return (replace(slot, parts=((slice(None),),)) for slot in super().tensor_slots(path))

    def _fill(self, held: Filling, group: list[_Placed], turned: bool, stored: Tensor) -> None:
        super()._fill(held, group, turned, torch.cat((stored[::2], stored[1::2])))


class QKVLinear(ColumnLinear):
    """x [tokens, inputs] → q [tokens, heads, dim], k and v [tokens, kv_heads, dim], views of one tensor.

    With two tensors in `reads`, those of q and k, v is k.
    """

    def __init__(
        self,
        inputs: int,
        heads: Heads,
        mesh: Mesh,
        *,
        bias: bool = False,
        reads: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
        transposed: bool = False,
        unbiased: Sequence[str] = (),
    ) -> None:
        self.heads, self.local_heads = heads, heads.share(mesh)
        sections = (heads.q_size, heads.kv_size, heads.kv_size)[: 2 if len(reads) == 2 else 3]
        super().__init__(inputs, sections, mesh, bias=bias, reads=reads, transposed=transposed, unbiased=unbiased)
        self._split = [self.local_heads.query, self.local_heads.kv, self.local_heads.kv][: len(sections)]

    def share_of(self, section: int) -> tuple[int, int]:
        return self.heads.query_share(self.mesh) if section == 0 else self.heads.kv_share(self.mesh)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """x [tokens, inputs] → q, k, v."""
        q, k, *v = torch.split(self.prepared(x).view(x.shape[0], -1, self.local_heads.dim), self._split, dim=1)
        return q, k, v[0] if v else k


class HeadsLinear(ColumnLinear):
    """x [tokens, inputs] → for each of `reads` [tokens, kv_heads, dim], views of one tensor."""

    def __init__(
        self,
        inputs: int,
        heads: Heads,
        mesh: Mesh,
        *,
        reads: Sequence[str],
        bias: bool = False,
        unbiased: Sequence[str] = (),
    ) -> None:
        self.heads, self.local_heads = heads, heads.share(mesh)
        super().__init__(inputs, [heads.kv_size] * len(reads), mesh, bias=bias, reads=reads, unbiased=unbiased)

    def share_of(self, section: int) -> tuple[int, int]:
        return self.heads.kv_share(self.mesh)

    def forward(self, x: Tensor) -> Sequence[Tensor]:  # type: ignore[override]
        """x [tokens, inputs] → the heads of each read tensor."""
        return torch.split(self.prepared(x).view(len(x), -1, self.local_heads.dim), self.local_heads.kv, dim=1)


class GatheredLinear(ColumnLinear):
    """x [tokens, this rank's share of inputs] → [tokens, outputs] on every rank.

    Shares of x and of the product are gathered, so that every output is summed up by one rank, as if there were no
    others: the same bits on any number of ranks.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, share of inputs] → [tokens, outputs]."""
        return self.mesh.gather(self.prepared(self.mesh.gather(x)))


class SummedLinear(PreparedLayer):
    """x [tokens, this rank's share of inputs] → [tokens, outputs], summed over the ranks.

    The bits depend on the number of ranks.
    """

    def __init__(self, inputs: int, outputs: int, mesh: Mesh, *, bias: bool = False, transposed: bool = False) -> None:
        # one rank adds the bias, for all are summed
        super().__init__(mesh.share(inputs)[1], outputs, bias=bias and mesh.tensor.rank == 0)
        self.inputs = inputs
        self.outputs = outputs
        self.mesh = mesh
        self.transposed = transposed
        self.has_bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, share of inputs] → [tokens, outputs]."""
        return self.mesh.sum(self.prepared(x))

    def use(self, methods: Methods, path: str) -> None:
        super().use(lambda name: without_cut_floats(methods(name), *self._cut()), path)

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        """Yield the tensors of the layer's own name."""
        for held in self.fillings():
            if held.name == "bias":
                continue
            total, columns = self._columns(held)
            turned = self.transposed and held.name == "weight"
            shape = (self.outputs, total)
            fill = partial(self._fill, held.key, columns, turned)
            part = _part(columns, outputs_last=not turned)
            yield TensorSlot(f"{path}.{held.name}", shape[::-1] if turned else shape, fill, (part,), dtype=held.dtype)
        if self.has_bias:
            yield TensorSlot(f"{path}.bias", (self.outputs,), self._fill_bias)

    def _cut(self) -> tuple[LinearShape, range]:
        """Return the sizes of the stored weight, and the inputs of this rank."""
        start, length = self.mesh.share(self.inputs)
        return LinearShape(self.outputs, self.inputs, self.dtype), range(start, start + length)

    def _columns(self, held: Filling) -> tuple[int, slice]:
        """Return how many columns a stored tensor has, and those of this rank. Raises ConfigError."""
        found = columns_of(self._parts[0].method, held.name, *self._cut())  # there is one stored weight
        if found is None:
            way = "tensor_parallel_reduce is sum"
            raise ConfigError(f"{way}, which would cut groups or the order of inputs of a quantised weight; use gather")
        return found

    def _fill(self, key: str, columns: slice, turned: bool, stored: Tensor) -> None:
        self.hold(key, (stored.t() if turned else stored)[:, columns])

    def _fill_bias(self, stored: Tensor) -> None:
        if self.mesh.tensor.rank == 0:
            self.hold("bias", stored)


def joined_linear(
    inputs: int, outputs: int, mesh: Mesh, *, bias: bool = False, transposed: bool = False
) -> ColumnLinear | SummedLinear:
    """Make the layer behind one that is cut: it takes this rank's share of the inputs and returns all outputs."""
    if mesh.tensor.size == 1:
        return ColumnLinear(inputs, outputs, mesh, bias=bias, transposed=transposed)
    kind = SummedLinear if mesh.reduce == "sum" else GatheredLinear
    return kind(inputs, outputs, mesh, bias=bias, transposed=transposed)
