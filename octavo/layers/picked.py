"""Linear layers whose outputs are picked from stored tensors, in any order: gates between queries, groups of heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.distributed.mesh import Mesh
from octavo.layers.heads import Heads
from octavo.layers.layer import Filling, PreparedLayer, TensorSlot
from octavo.quantization.method import Methods, without_codes


class Pick(NamedTuple):
    """Outputs of a stored tensor that has `outputs` of them: `rows` in this order, times `factor`."""

    name: str
    outputs: int
    rows: Sequence[slice]
    factor: float = 1.0

    @property
    def length(self) -> int:
        """The number of outputs that are picked."""
        return sum(each.stop - each.start for each in self.rows)


class PickedLinear(PreparedLayer):
    """x [tokens, inputs] → [tokens, all picks side by side]: outputs of tensors beside the layer, in any order."""

    def __init__(self, inputs: int, picks: Sequence[Pick], *, bias: bool = False, gated: bool = False) -> None:
        own, stored = sum(each.length for each in picks), {each.name: each.outputs for each in picks}
        super().__init__(inputs, own, bias=bias, gated=gated, all_outputs=sum(stored.values()))
        self._picks = picks

    def use(self, methods: Methods, path: str) -> None:
        beside = path.removesuffix(path.rpartition(".")[2])
        scaled = {f"{beside}{each.name}" for each in self._picks if each.factor != 1.0}
        super().use(lambda name: without_codes(methods(name)) if name in scaled else methods(name), path)

    def sources(self, path: str) -> list[tuple[str, int]]:
        beside = path.removesuffix(path.rpartition(".")[2])
        return [(f"{beside}{each.name}", each.length) for each in self._picks]

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        """Yield the tensors that picks name, each once."""
        beside = path.removesuffix(path.rpartition(".")[2])
        slots: dict[str, TensorSlot] = {}
        for held in self.fillings():
            own = [(start, pick) for start, pick in self._placed() if held.start <= start < held.stop]
            for name in dict.fromkeys(pick.name for _, pick in own):
                picks = [(start, pick) for start, pick in own if pick.name == name]
                rows = tuple((rows,) for _, pick in picks for rows in pick.rows)
                fill = partial(self._fill, held, picks)
                slot = self.slot(held, f"{beside}{name}", picks[0][1].outputs, fill, rows)
                before = slots.get(slot.name)
                slots[slot.name] = slot if before is None else _joined(before, slot)
        yield from slots.values()

    def _placed(self) -> Iterator[tuple[int, Pick]]:
        """Yield each pick with its place among the outputs."""
        return zip(accumulate((each.length for each in self._picks), initial=0), self._picks, strict=False)

    def _fill(self, held: Filling, picks: list[tuple[int, Pick]], stored: Tensor) -> None:
        room = self.room(held.key, stored.device)
        for start, pick in picks:
            target = start - held.start
            for rows in pick.rows:
                place = room.narrow(0, target, rows.stop - rows.start)
                target += len(place)
                place.copy_(stored[rows] if pick.factor == 1.0 else stored[rows] * pick.factor)


def _joined(first: TensorSlot, second: TensorSlot) -> TensorSlot:
    """Return the slot of a tensor whose picks lie before and after those of a tensor with another weight method."""

    def fill(stored: Tensor) -> None:
        first.fill(stored)
        second.fill(stored)

    return replace(first, fill=fill, parts=(*first.parts, *second.parts))


class GatedQKVLinear(PickedLinear):
    """x [tokens, inputs] → q, k, v and gate, views of one tensor.

    Gates are the tensor `gate`, or are stored behind the query of each head where that is q_proj. `by_head`: it has one
    gate for each head, which is repeated for all elements.
    """

    def __init__(
        self, inputs: int, heads: Heads, mesh: Mesh, *, bias: bool = False, gate: str = "q_proj", by_head: bool = False
    ) -> None:
        self.local_heads, dim = heads.share(mesh), heads.dim
        (first, length), (kv_first, kv_length) = heads.query_share(mesh), heads.kv_share(mesh)
        own, kv = (slice(first, first + length),), (slice(kv_first, kv_first + kv_length),)
        queries, gates = Pick("q_proj", heads.q_size, own), Pick(gate, heads.q_size, own)
        if gate == "q_proj":
            starts = range(2 * first, 2 * (first + length), 2 * dim)
            queries = Pick("q_proj", 2 * heads.q_size, [slice(start, start + dim) for start in starts])
            gates = Pick("q_proj", 2 * heads.q_size, [slice(start + dim, start + 2 * dim) for start in starts])
        elif by_head:
            own_heads = range(first // dim, (first + length) // dim)
            gates = Pick(gate, heads.query, [slice(head, head + 1) for head in own_heads for _ in range(dim)])
        picks = [queries, Pick("k_proj", heads.kv_size, kv), Pick("v_proj", heads.kv_size, kv), gates]
        super().__init__(inputs, picks, bias=bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # type: ignore[override]
        """x [tokens, inputs] → q and gate [tokens, heads, dim], k and v [tokens, kv_heads, dim], in the order q, k, v,
        gate."""
        own = self.local_heads
        counts = [own.query, own.kv, own.kv, own.query]
        q, k, v, gate = torch.split(self.prepared(x).view(x.shape[0], -1, own.dim), counts, dim=1)
        return q, k, v, gate


class GroupedQKVLinear(PickedLinear):
    """x [tokens, inputs] → q, k and v as `QKVLinear` returns them, from the one tensor that `reads` names.

    For each head of keys it has the queries of that head, then the key and the value; with `shards`, which divide the
    heads, for each shard all its queries, then its values, then its keys. Of two tensors the first has all queries.
    """

    def __init__(
        self, inputs: int, heads: Heads, mesh: Mesh, *, reads: Sequence[str], bias: bool = False, shards: int = 0
    ) -> None:
        self.local_heads, dim, shared = heads.share(mesh), heads.dim, heads.query // heads.kv
        own, own_kv = (
            range(start // dim, (start + length) // dim)
            for start, length in (heads.query_share(mesh), heads.kv_share(mesh))
        )
        groups = [(head + 1) * (shared + 2) for head in own_kv]  # where each group ends
        places = ([head + head // shared * 2 for head in own], [end - 2 for end in groups], [end - 1 for end in groups])
        if shards:
            count = heads.query // shards
            first = [head + head // count * 2 * count for head in own]  # of queries
            places = (first, [place + 2 * count for place in first], [place + count for place in first])
        outputs = heads.q_size + 2 * heads.kv_size
        stored = [(reads[0], outputs)] * 3
        if len(reads) == 2:
            places = ([*own], [2 * head for head in own_kv], [2 * head + 1 for head in own_kv])
            stored = [(reads[0], heads.q_size)] + [(reads[1], 2 * heads.kv_size)] * 2
        picks = [
            Pick(*tensor, [slice(place * dim, (place + 1) * dim) for place in each])
            for tensor, each in zip(stored, places, strict=True)
        ]
        super().__init__(inputs, picks, bias=bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """x [tokens, inputs] → q [tokens, heads, dim], k and v [tokens, kv_heads, dim]."""
        own = self.local_heads
        q, k, v = torch.split(self.prepared(x).view(len(x), -1, own.dim), [own.query, own.kv, own.kv], dim=1)
        return q, k, v
