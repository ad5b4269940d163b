"""The heads of an attention layer."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.distributed.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Heads:
    """`query` heads share `kv` key and value heads, all of size `dim`."""

    query: int
    kv: int
    dim: int

    @property
    def q_size(self) -> int:
        """Width of all queries."""
        return self.query * self.dim

    @property
    def kv_size(self) -> int:
        """Width of all keys, and of all values."""
        return self.kv * self.dim

    def share(self, mesh: Mesh) -> Heads:
        """Return this rank's heads. Raises ConfigError where the ranks cannot share the heads."""
        return Heads(self.query_share(mesh)[1] // self.dim, self.kv_share(mesh)[1] // self.dim, self.dim)

    def query_share(self, mesh: Mesh) -> tuple[int, int]:
        """Return (start, length) of this rank's queries in the width of all. Raises ConfigError."""
        start, count = mesh.share(self.query, "attention heads")
        return start * self.dim, count * self.dim

    def kv_share(self, mesh: Mesh) -> tuple[int, int]:
        """Return (start, length) of this rank's keys in the width of all; ranks that outnumber the heads share some.

        Raises ConfigError.
        """
        size = mesh.tensor.size
        if self.kv < size and size % self.kv == 0:
            start, count = mesh.tensor.rank * self.kv // size, 1
        else:
            start, count = mesh.share(self.kv, "key and value heads")
        return start * self.dim, count * self.dim
