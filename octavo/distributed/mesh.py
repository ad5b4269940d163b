"""A mesh: the ranks that share one model, seen from one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Axis:
    """`rank` of `size` along one way of sharing a model."""

    rank: int = 0
    size: int = 1

    def share(self, count: int) -> tuple[int, int]:
        """Return (start, length) of this rank's share of `count` equal things.

        Raises ConfigError where the shares would not be equal.
        """
        if count % self.size:
            raise ConfigError(
                f"tensor_parallel_size is {self.size}, must divide {count}, a size of this model; choose another"
            )
        length = count // self.size
        return self.rank * length, length


@dataclass(frozen=True, slots=True)
class Mesh:
    """The place of one rank: `tensor` ranks share each layer, `pipeline` ranks share the layers, `expert` ranks the
    experts. This class combines nothing: alone, a rank's result is the whole result.
    """

    tensor: Axis = Axis()
    pipeline: Axis = Axis()
    expert: Axis = Axis()

    @classmethod
    def single(cls) -> Self:
        """Return the mesh of one rank."""
        return cls()

    @classmethod
    def of_rank(cls, rank: int, *, tensor: int = 1, pipeline: int = 1) -> Self:
        """Return the place of `rank`, where the ranks of one pipeline stage are neighbours."""
        stage, place = divmod(rank, tensor)
        return cls(Axis(place, tensor), Axis(stage, pipeline))

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.tensor.size * self.pipeline.size

    @property
    def description(self) -> str:
        """Names the part of the weights that this rank has."""
        stages = f", {self.pipeline.size} stages" if self.pipeline.size > 1 else ""
        return f"{self.pipeline.rank * self.tensor.size + self.tensor.rank} of {self.size}{stages}"

    def layer_range(self, num_layers: int) -> range:
        """Return the layers of this rank's pipeline stage; the first stages have one more where shares differ."""
        stage, stages = self.pipeline.rank, self.pipeline.size
        least, extra = divmod(num_layers, stages)
        start = stage * least + min(stage, extra)
        return range(start, start + least + (stage < extra))

    def share(self, count: int) -> tuple[int, int]:
        """Return (start, length) of this rank's share of `count` heads, output columns or vocabulary rows."""
        return self.tensor.share(count)

    def sum(self, partial: Tensor) -> Tensor:
        """Return the sum of the `partial` of every tensor rank, on every rank."""
        assert self.tensor.size == 1, "several ranks need a mesh that can reach them"
        return partial

    def gather(self, share: Tensor) -> Tensor:
        """Return the shares of all tensor ranks side by side along the last dimension, on every rank."""
        assert self.tensor.size == 1, "several ranks need a mesh that can reach them"
        return share
