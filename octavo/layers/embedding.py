"""Token and position embeddings, and the head that turns hidden states into logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octavo.distributed.mesh import Mesh
from octavo.errors import CheckpointError
from octavo.layers.layer import Binding, Layer, TensorSlot


class Embedding(Layer):
    """A table [rows, dim], read by row. `offset` rows come before the one of index 0."""

    def __init__(self, rows: int, dim: int, *, offset: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows + offset, dim), requires_grad=False)
        self.offset = offset
        self._embedding: Callable[..., Any]

    def forward(self, ids: Tensor) -> Tensor:
        """ids int64 [tokens] → [tokens, dim]."""
        found: Tensor = self._embedding(ids + self.offset if self.offset else ids, self.weight)
        return found

    def bind(self, binding: Binding) -> None:
        """Take the operator."""
        self._embedding = binding.ops.embedding


class LMHead(Layer):
    """Hidden states [rows, dim] → float32 logits [rows, vocabulary].

    With `tied_to` the head shares the embedding's table. A checkpoint may still hold a table under the head's name;
    one that differs is an error, for one of the two would be dropped.
    """

    def __init__(self, dim: int, vocab_size: int, mesh: Mesh, *, tied_to: Embedding | None = None) -> None:
        super().__init__()
        self.mesh = mesh
        self.tied = tied_to is not None
        self.vocab_size = vocab_size
        if tied_to is not None:
            self.weight = tied_to.weight
        else:
            self.weight = nn.Parameter(torch.empty(mesh.share(vocab_size)[1], dim), requires_grad=False)
        self._linear: Callable[..., Any]

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [rows, dim] → float32 [rows, vocabulary]."""
        logits: Tensor = self._linear(hidden, self.weight)
        return self.mesh.gather(logits).float()

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        """The head's table, optional where it is the embedding's."""
        name, shape = f"{path}.weight", (self.vocab_size, self.weight.shape[1])
        yield TensorSlot(name, shape, partial(self._fill, name), required=not self.tied)

    def bind(self, binding: Binding) -> None:
        """Take the operator."""
        self._linear = binding.ops.linear

    def _fill(self, name: str, stored: Tensor) -> None:
        if not self.tied:
            start, length = self.mesh.share(self.vocab_size)
            self.weight.copy_(stored.narrow(0, start, length))
        elif not torch.equal(self.weight, stored.to(self.weight.dtype)):
            raise CheckpointError(
                f"{name} differs from the token embedding although config.json ties them; "
                "set tie_word_embeddings to false in config.json to use both"
            )
