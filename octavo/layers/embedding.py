"""Token and position embeddings, and the head that turns hidden states into logits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError
from octavo.layers.layer import Layer, PreparedLayer, TensorSlot


class Embedding(Layer):
    """A table [rows, dim], read by row. `offset` rows come before the one of index 0."""

    def __init__(self, rows: int, dim: int, *, offset: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows + offset, dim), requires_grad=False)
        self.offset = offset

    def forward(self, ids: Tensor) -> Tensor:
        """ids int64 [tokens] → [tokens, dim]."""
        found: Tensor = self.ops.embedding(ids, self.weight, self.offset)
        return found


class TiedEmbedding(PreparedLayer):
    """A table [rows, dim] that is read by row and multiplied by the head, kept once in the form that computes best."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__(dim, rows)

    def forward(self, ids: Tensor) -> Tensor:
        """ids int64 [tokens] → [tokens, dim]."""
        return self.prepared.rows(ids)

    def holds(self, table: Tensor) -> bool:
        """Return whether the finished layer was made of `table` [rows, dim]."""
        inputs, outputs, bias = self._sizes
        twin = nn.Module()
        with torch.device("meta"):
            self.method.make(twin, inputs, outputs, bias)
        twin.weight = nn.Parameter(table.to(self.prepared.shape.dtype), requires_grad=False)
        held, made = self.state(), self.method.finish(twin, self.ops).state()
        return all(torch.equal(held[name], made[name]) for name in held)


class LMHead(PreparedLayer):
    """Hidden states [rows, dim] → float32 logits [rows, vocabulary], by a table of its own."""

    def __init__(self, dim: int, vocab_size: int, mesh: Mesh) -> None:
        super().__init__(dim, mesh.share(vocab_size)[1])
        self.mesh = mesh
        self.dim = dim
        self.vocab_size = vocab_size

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [rows, dim] → float32 [rows, vocabulary]."""
        return self.mesh.gather(self.prepared.in_float32(hidden))

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        """Yield the head's table."""
        yield TensorSlot(f"{path}.weight", (self.vocab_size, self.dim), self._fill)

    def _fill(self, stored: Tensor) -> None:
        start, length = self.mesh.share(self.vocab_size)
        self.hold("weight", stored.narrow(0, start, length))


class TiedHead(Layer):
    """The head that multiplies by the embedding's table, which every rank has whole.

    A checkpoint may still hold a table under the head's name; one that differs is an error, for one of the two would
    be dropped.
    """

    def __init__(self, dim: int, vocab_size: int, embedding: TiedEmbedding) -> None:
        super().__init__()
        self.table_shape = (vocab_size, dim)
        # in a tuple, for the embedding is no part of the head
        self._shared = (embedding,)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [rows, dim] → float32 [rows, vocabulary]."""
        return self._shared[0].prepared.in_float32(hidden)

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        """Yield the table once more, which a checkpoint may repeat."""
        name = f"{path}.weight"
        yield TensorSlot(name, self.table_shape, partial(self._compare, name), required=False)

    def _compare(self, name: str, stored: Tensor) -> None:
        if not self._shared[0].holds(stored):
            raise CheckpointError(
                f"{name} differs from the token embedding although config.json ties them; "
                "set tie_word_embeddings to false in config.json to use both"
            )


def embedding_and_head(
    vocab_size: int, dim: int, mesh: Mesh, *, tied: bool
) -> tuple[Embedding | TiedEmbedding, LMHead | TiedHead]:
    """Make embedding and head of a decoder, with one table or two."""
    if not tied:
        return Embedding(vocab_size, dim), LMHead(dim, vocab_size, mesh)
    embedding = TiedEmbedding(vocab_size, dim)
    return embedding, TiedHead(dim, vocab_size, embedding)
