"""Granite 4: Mamba2 in most layers, attention in some, with Granite's factors, also with mixtures of experts.

Source: IBM's releases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import nn

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.recurrent import Mamba2, MambaOptions, RecurrentSizes
from octavo.models.blocks import RotaryAttention
from octavo.models.granite_parts import MIXTURE_NAMES, granite_layer, read_factors, read_granite_mixture
from octavo.models.hybrid import ATTENTION, HybridConfig, HybridDecoder, read_kinds, read_limits, read_mamba
from octavo.models.sparse import Mixture, SparseMLP

ARCHITECTURES = ("GraniteMoeHybridForCausalLM",)


@dataclass(frozen=True, kw_only=True)
class GraniteMoeHybridConfig(HybridConfig):
    """Attention rotates heads only where `position_embedding_type` is rope; `mixture` is None where MLPs are dense."""

    sizes: RecurrentSizes
    options: MambaOptions
    mixture: Mixture | None

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("hidden_act", "silu")
        shared = c.positive("shared_intermediate_size")
        mixture = None
        if c.values.get("num_local_experts", 8) != 0:
            mixture = read_granite_mixture(c, c.positive("intermediate_size"), shared)
        bias = c.bool("attention_bias", False)
        own: dict[str, Any] = {} if c.values.get("position_embedding_type") == "rope" else {"rope": None}
        sizes = read_mamba(c, c.positive("hidden_size"))
        options = MambaOptions(
            bias=c.bool("mamba_proj_bias", False),
            convolution_bias=c.bool("mamba_conv_bias", True),
            out_bias=c.bool("mamba_proj_bias", False),
            limits=read_limits(c),
            norm_groups=sizes.key_heads,
        )
        return cls.common(
            c,
            intermediate_size=shared,
            mixture=mixture,
            qkv_bias=bias,
            out_bias=bias,
            gate_up_reads=("input_linear",),
            **read_factors(c),
            windows=(),
            kinds=read_kinds(c),
            sizes=sizes,
            eps=c.positive_float("rms_norm_eps", 1e-6),
            options=options,
            **own,
        )


class GraniteMoeHybridForCausalLM(HybridDecoder):
    """The whole model."""

    Config = GraniteMoeHybridConfig
    RECURRENT_NAME = "mamba"
    RENAMED: ClassVar[Mapping[str, str]] = {"mlp": "shared_mlp", "down_proj": "output_linear"}

    def __init__(self, c: GraniteMoeHybridConfig, mesh: Mesh) -> None:
        def mixer(layer: int) -> nn.Module:
            if c.kinds[layer] == ATTENTION:
                return RotaryAttention(c, mesh, layer)
            return Mamba2(c.sizes, c.hidden_size, c.eps, mesh, c.options)

        mixture = c.mixture
        mlp = None if mixture is None else lambda _: SparseMLP(c, mixture, mesh)
        super().__init__(c, mesh, attention=mixer, mlp=mlp, layer=granite_layer(c))
        if mixture is not None:  # names follow the checkpoint, not the class
            self.__dict__["RENAMED"] = MIXTURE_NAMES


MODEL = GraniteMoeHybridForCausalLM
