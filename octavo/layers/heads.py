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
        """Return this rank's heads."""
        return Heads(mesh.share(self.query)[1], mesh.share(self.kv)[1], self.dim)
