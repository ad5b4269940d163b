"""Linear layers, cut by output (columns) or input (rows) over the ranks of a mesh.

Tensors that are multiplied with the same input are kept as one weight: `reads` names them, beside the layer in the
checkpoint's tree, in the order in which their outputs are wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from octavo.distributed.mesh import Mesh
from octavo.layers.heads import Heads
from octavo.layers.layer import PreparedLayer, TensorSlot


class ColumnLinear(PreparedLayer):
    """x [tokens, inputs] → [tokens, sum of this rank's shares of `sections`].

    `sections` are the output sizes that each are shared evenly by the ranks. `reads` names one tensor per section, or
    a single one that holds all of them stacked; by default the layer's own name. `transposed` is for checkpoints that
    store [inputs, outputs].
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
    ) -> None:
        self.sections = (sections,) if isinstance(sections, int) else tuple(sections)
        super().__init__(inputs, sum(mesh.share(size)[1] for size in self.sections), bias=bias, gated=gated)
        assert len(reads) in (0, 1, len(self.sections)), f"{reads} cannot fill {len(self.sections)} sections"
        self.mesh = mesh
        self.reads = tuple(reads)
        self.transposed = transposed

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, inputs] → [tokens, outputs]."""
        return self.prepared(x)

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        """Yield one tensor per read name and parameter."""
        parent, _, own = path.rpartition(".")
        beside = f"{parent}." if parent else ""
        names = self.reads or (own,)
        # (start of the section in its tensor, its size, where this rank's share of it goes)
        placed: list[tuple[int, int, int]] = []
        for size in self.sections:
            placed.append((sum(each[1] for each in placed), size, sum(self.mesh.share(each[1])[1] for each in placed)))
        for parameter_name, parameter in self.named_parameters(recurse=False):
            inner = tuple(parameter.shape[1:])
            if len(names) < len(self.sections):
                groups = [placed]
            else:
                groups = [[(0, size, target)] for _, size, target in placed]
            for name, group in zip(names, groups, strict=True):
                stored = (sum(size for _, size, _ in group), *inner)
                yield TensorSlot(
                    f"{beside}{name}.{parameter_name}",
                    stored[::-1] if self.transposed else stored,
                    partial(self._fill, parameter_name, group),
                )

    def _fill(self, name: str, group: list[tuple[int, int, int]], stored: Tensor) -> None:
        rows = stored.t() if self.transposed else stored
        if self.mesh.tensor.size == 1 and rows.shape == self.get_parameter(name).shape:
            self.hold(name, rows)
            return
        room = self.room(name, stored.device)
        for source, size, target in group:
            start, length = self.mesh.share(size)
            room.narrow(0, target, length).copy_(rows.narrow(0, source + start, length))


class GatedLinear(ColumnLinear):
    """x [tokens, inputs] → silu(gate(x)) * up(x) [tokens, this rank's share of width], from one product."""

    def __init__(
        self,
        inputs: int,
        width: int,
        mesh: Mesh,
        *,
        bias: bool = False,
        reads: Sequence[str] = ("gate_proj", "up_proj"),
    ) -> None:
        super().__init__(inputs, (width, width), mesh, bias=bias, reads=reads, gated=True)


class QKVLinear(ColumnLinear):
    """x [tokens, inputs] → q [tokens, heads, dim], k and v [tokens, kv_heads, dim], views of one tensor."""

    def __init__(
        self,
        inputs: int,
        heads: Heads,
        mesh: Mesh,
        *,
        bias: bool = False,
        reads: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
        transposed: bool = False,
    ) -> None:
        sections = (heads.q_size, heads.kv_size, heads.kv_size)
        super().__init__(inputs, sections, mesh, bias=bias, reads=reads, transposed=transposed)
        self.local_heads = heads.share(mesh)
        self._split = [self.local_heads.query, self.local_heads.kv, self.local_heads.kv]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """x [tokens, inputs] → q, k, v."""
        q, k, v = torch.split(self.prepared(x).view(x.shape[0], -1, self.local_heads.dim), self._split, dim=1)
        return q, k, v


class RowLinear(PreparedLayer):
    """x [tokens, this rank's share of inputs] → [tokens, outputs], summed over the ranks."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        mesh: Mesh,
        *,
        bias: bool = False,
        transposed: bool = False,
    ) -> None:
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

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        """Yield the tensors of the layer's own name."""
        stored = (self.outputs, self.inputs)
        yield TensorSlot(f"{path}.weight", stored[::-1] if self.transposed else stored, self._fill_weight)
        if self.has_bias:
            yield TensorSlot(f"{path}.bias", (self.outputs,), self._fill_bias)

    def _fill_weight(self, stored: Tensor) -> None:
        start, length = self.mesh.share(self.inputs)
        self.hold("weight", (stored.t() if self.transposed else stored).narrow(1, start, length))

    def _fill_bias(self, stored: Tensor) -> None:
        if self.mesh.tensor.rank == 0:
            self.hold("bias", stored)
