"""A mesh: the ranks that share one model, seen from one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Mesh:
    """`rank` of `size`. This class combines nothing: alone, a rank's result is the whole result."""

    rank: int = 0
    size: int = 1

    @classmethod
    def single(cls) -> Self:
        """The mesh of one rank."""
        return cls()

    def share(self, count: int) -> tuple[int, int]:
        """(start, length) of this rank's share of `count` equal things: heads, output columns, vocabulary rows."""
        assert count % self.size == 0, f"{count} cannot be shared evenly by {self.size} ranks"
        length = count // self.size
        return self.rank * length, length

    def layer_range(self, num_layers: int) -> range:
        """The layers of this rank's pipeline stage."""
        return range(num_layers)

    def sum(self, partial: Tensor) -> Tensor:
        """The sum of every rank's `partial`, on every rank."""
        assert self.size == 1, "several ranks need a mesh that can reach them"
        return partial

    def gather(self, share: Tensor) -> Tensor:
        """All ranks' shares side by side along the last dimension, on every rank."""
        assert self.size == 1, "several ranks need a mesh that can reach them"
        return share
