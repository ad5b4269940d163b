"""Mixtral: Mistral whose MLPs are mixtures of experts.

Source: https://arxiv.org/abs/2401.04088.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.experts import StoredExperts
from octavo.models.blocks import GatedDecoder
from octavo.models.config import DecoderConfig, read_windows
from octavo.models.sparse import Mixture, SparseMLP, read_stored
from octavo.ops.experts import RouterRule

ARCHITECTURES = ("MixtralForCausalLM",)


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(DecoderConfig):
    """All layers have the mixture, whose experts are as wide as `intermediate_size`."""

    mixture: Mixture
    path: str
    """What the checkpoint calls the MLP: `block_sparse_moe` where hubs hold it, or `mlp`."""

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("hidden_act", "silu")
        stored = read_stored(c, StoredExperts("w1", "w3", "w2"))
        mixture = Mixture(
            experts=c.positive("num_local_experts"),
            width=c.positive("intermediate_size"),
            rule=RouterRule(c.positive("num_experts_per_tok"), is_normalized=True),
            stored=stored,
        )
        is_windowed = c.optional_positive("sliding_window") is not None
        return cls.common(
            c,
            norm_eps=c.positive_float("rms_norm_eps", 1e-5),
            windows=read_windows(c, is_windowed=is_windowed),
            mixture=mixture,
            path="mlp" if stored.is_stacked else "block_sparse_moe",
        )


class MixtralForCausalLM(GatedDecoder):
    """The whole model."""

    Config = MixtralConfig

    def __init__(self, c: MixtralConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh, mlp=lambda _: SparseMLP(c, c.mixture, mesh))
        # names follow the checkpoint, not the class
        self.__dict__["RENAMED"] = {"mlp": c.path}


MODEL = MixtralForCausalLM
