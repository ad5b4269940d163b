"""Token and position embeddings, and the head that turns hidden states into logits.

The ranks of a mesh share the vocabulary: each has a range of rows of the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn

from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError
from octavo.layers.layer import Layer, PreparedLayer, TensorSlot
from octavo.quantization.method import Coded, Methods, without_codes


@dataclass(frozen=True, slots=True)
class VocabularyShare:
    """The rows [start, start + length) that a rank stores, of `total`. Every rank has memory for `room` rows."""

    start: int
    length: int
    room: int
    total: int

    @classmethod
    def of(cls, total: int, mesh: Mesh, num_unstored: int = 0) -> Self:
        """Return the share of one rank; the last ones may have fewer rows than room, or none.

        num_unstored: rows behind `total` of which the share has zeros.
        """
        room = -(-(total + num_unstored) // mesh.tensor.size)
        start = min(mesh.tensor.rank * room, total)
        return cls(start, min(room, total - start), room, total)

    def slot(self, name: str, inner: tuple[int, ...], hold: Callable[[Tensor], None]) -> TensorSlot:
        """Return the slot of a table [total, *inner]; `hold` gets this rank's rows, and zeros up to `room` behind."""
        rows = slice(self.start, self.start + self.length)

        def fill(stored: Tensor) -> None:
            own, missing = stored[rows], self.room - self.length
            hold(nn.functional.pad(own, (*(0, 0) * len(inner), 0, missing)) if missing else own)

        return TensorSlot(name, (self.total, *inner), fill, parts=((rows,),))


class Embedding(Layer):
    """A table [rows, dim], read by row. `offset` rows come before the one of index 0; such a table is not shared."""

    def __init__(self, rows: int, dim: int, mesh: Mesh | None = None, *, offset: int = 0) -> None:
        super().__init__()
        self.mesh = mesh or Mesh.single()
        self.share = VocabularyShare.of(rows + offset, self.mesh)
        self.weight = nn.Parameter(torch.empty(self.share.room, dim), requires_grad=False)
        self.offset = offset

    def forward(self, ids: Tensor) -> Tensor:
        """ids int64 [tokens] → [tokens, dim]."""
        return _find(self, ids, lambda places: self.ops.embedding(places, self.weight, self.offset))

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        """Yield the table."""
        yield self.share.slot(f"{path}.weight", tuple(self.weight.shape[1:]), partial(self.hold, "weight"))


class ExtendedEmbedding(Embedding):
    """A table of which the checkpoint holds the rows behind the first `num_first` in a tensor of their own."""

    def __init__(self, rows: int, dim: int, mesh: Mesh, *, num_first: int) -> None:
        super().__init__(rows, dim, mesh)
        self._num_first = num_first

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        """Yield both tables."""
        own, behind = self.share, self._num_first
        for name, first, end in (("embedding", 0, behind), ("new_embedding", behind, own.total)):
            begin = min(max(own.start, first), end)
            rows = slice(begin - first, max(begin, min(own.start + own.length, end)) - first)
            fill = partial(self._fill, rows, begin - own.start)
            yield TensorSlot(f"{path}.{name}", (end - first, *self.weight.shape[1:]), fill, parts=((rows,),))

    def _fill(self, rows: slice, target: int, stored: Tensor) -> None:
        part = stored[rows]
        self.room("weight", stored.device)[max(target, 0) :][: len(part)].copy_(part)


class LMHead(PreparedLayer):
    """Hidden states [rows, dim] → float32 logits of this rank's tokens, [rows, room], by a table of its own."""

    def __init__(self, dim: int, vocab_size: int, mesh: Mesh, *, bias: bool = False, num_unstored: int = 0) -> None:
        """num_unstored: the last of the tokens, of which the table has no rows: their logits are the lowest number."""
        self.mesh, self.dim, self._has_unstored = mesh, dim, num_unstored > 0
        self.share = VocabularyShare.of(vocab_size - num_unstored, mesh, num_unstored)
        super().__init__(dim, self.share.room, bias=bias, all_outputs=vocab_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [rows, dim] → float32 [rows, room]."""
        logits = self.prepared.in_float32(hidden)
        if self._has_unstored:
            logits[:, self.share.length :] = torch.finfo(logits.dtype).min
        return logits

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        """Yield the table, and the bias where there is one."""
        for held in self.fillings():
            own = self.share.slot("", held.inner, partial(self.hold, held.key))
            yield self.slot(held, path, self.share.total, own.fill, own.parts)


class UnitRowsHead(LMHead):
    """A head whose rows are divided by their lengths when they are loaded, in the type in which they are stored."""

    def use(self, methods: Methods, path: str) -> None:
        super().use(lambda name: without_codes(methods(name)), path)

    def hold(self, name: str, value: Tensor) -> None:
        super().hold(name, nn.functional.normalize(value) if name == "weight" else value)


class TokenBias(Layer):
    """Adds a stored number to the score of each of this rank's tokens."""

    def __init__(self, vocab_size: int, mesh: Mesh | None = None) -> None:
        super().__init__()
        self.share = VocabularyShare.of(vocab_size, mesh or Mesh.single())
        self.bias = nn.Parameter(torch.empty(self.share.room), requires_grad=False)

    def forward(self, logits: Tensor) -> Tensor:
        """logits float32 [rows, room] → [rows, room]."""
        return logits + self.bias.float()

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        """Yield the numbers."""
        yield self.share.slot(f"{path}.bias", (), partial(self.hold, "bias"))


class TiedEmbedding(LMHead):
    """A table [rows, dim] that is read by row and multiplied by the head, kept once in the form that computes best."""

    def forward(self, ids: Tensor) -> Tensor:
        """ids int64 [tokens] → [tokens, dim]."""
        return _find(self, ids, self.prepared.rows)

    def holds(self, table: Tensor) -> bool:
        """Return whether the finished layer was made of `table` [room, dim], this rank's rows."""
        (part,), shape = self._parts, self.prepared.shape
        if isinstance(part.method, Coded):
            return torch.equal(
                self.prepared.rows(torch.arange(shape.outputs, device=table.device)), table.to(shape.dtype)
            )
        held, made = self.state(), part.method.pack(self.ops, shape, {"weight": table.to(shape.dtype)}, None).state()
        return all(torch.equal(held[name], made[name]) for name in held)


class TiedHead(Layer):
    """The head that multiplies by the embedding's table.

    A checkpoint may still hold a table under the head's name; one that differs is an error, for one of the two would
    be dropped.
    """

    def __init__(self, embedding: TiedEmbedding) -> None:
        super().__init__()
        # in a tuple, for the embedding is no part of the head
        self._shared = (embedding,)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [rows, dim] → float32 logits of this rank's tokens, [rows, room]."""
        return self._shared[0].prepared.in_float32(hidden)

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        """Yield the table once more, which a checkpoint may repeat."""
        name, (embedding,) = f"{path}.weight", self._shared
        slot = embedding.share.slot(name, (embedding.dim,), partial(self._compare, name))
        yield replace(slot, required=False)

    def _compare(self, name: str, rows: Tensor) -> None:
        if not self._shared[0].holds(rows):
            raise CheckpointError(
                f"{name} differs from the token embedding although config.json ties them; "
                "set tie_word_embeddings to false in config.json to use both"
            )


def embedding_and_head(
    vocab_size: int, dim: int, mesh: Mesh, *, tied: bool, bias: bool = False
) -> tuple[Embedding | TiedEmbedding, LMHead | TiedHead]:
    """Make embedding and head of a decoder, with one table or two; a tied head has no bias."""
    if not tied:
        return Embedding(vocab_size, dim, mesh), LMHead(dim, vocab_size, mesh, bias=bias)
    embedding = TiedEmbedding(dim, vocab_size, mesh)
    return embedding, TiedHead(embedding)


def _find(layer: Embedding | TiedEmbedding, ids: Tensor, find: Callable[[Tensor], Tensor]) -> Tensor:
    """Return rows [tokens, dim] of a shared table; `find` reads rows of this rank's share by their places in it.

    The rows of the other ranks are zeros here, so that the sum over the ranks is exact.
    """
    share, ops = layer.share, layer.ops
    if share.room == share.total:
        return find(ids)
    found = find(ops.share_ids(ids, share.start, share.length, share.total))
    return layer.mesh.sum(ops.share_rows(found, ids, share.start, share.length))
