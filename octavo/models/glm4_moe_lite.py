"""GLM-4.7-Flash: DeepSeek V3's blocks with one group of experts. Source: https://huggingface.co/zai-org/GLM-4.7-Flash."""

from __future__ import annotations

from typing import Self

from octavo.config.checkpoint import Checkpoint
from octavo.models.sparse import corrected, dense_first
from octavo.models.sparse_latent import SparseLatentConfig, SparseLatentDecoder

ARCHITECTURES = ("Glm4MoeLiteForCausalLM",)


class Glm4MoeLiteConfig(SparseLatentConfig):
    """`mlp_layer_types` says which layers are mixtures, all but the first unless given."""

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        kinds, sparse = c.values.get("mlp_layer_types"), dense_first(c, 1)
        if kinds is not None:
            if not isinstance(kinds, list) or len(kinds) != len(sparse) or set(kinds) - {"dense", "sparse"}:
                raise c.error("mlp_layer_types", f'"dense" or "sparse" for each of {len(sparse)} layers')
            sparse = tuple(kind == "sparse" for kind in kinds)
        mixture = corrected(c, groups=(1, 1), factor=1.8)
        return cls.common_latent(c, norm_eps=c.positive_float("rms_norm_eps", 1e-5), mixture=mixture, sparse=sparse)


class Glm4MoeLiteForCausalLM(SparseLatentDecoder):
    """The whole model."""

    Config = Glm4MoeLiteConfig


MODEL = Glm4MoeLiteForCausalLM
