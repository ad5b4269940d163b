"""What DeepSeek's descendants share: attention over latents, and mixtures of experts behind the first layers."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.distributed.mesh import Mesh
from octavo.models.latent import LatentConfig, LatentDecoder
from octavo.models.sparse import Mixture, sparse_mlps


@dataclass(frozen=True, kw_only=True)
class SparseLatentConfig(LatentConfig):
    """`sparse[layer]` says which layers have the mixture."""

    mixture: Mixture
    sparse: tuple[bool, ...]


class SparseLatentDecoder(LatentDecoder):
    """Mixtures of experts where the config says so, gated MLPs elsewhere."""

    def __init__(self, c: SparseLatentConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh, sparse_mlps(c, c.mixture, c.sparse, mesh))
