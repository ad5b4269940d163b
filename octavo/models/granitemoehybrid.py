"""Granite 4: Mamba2 in most layers, attention in some, with Granite's factors. Source: IBM's releases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

from torch import nn

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.elementwise import Elementwise
from octavo.layers.recurrent import Mamba2, MambaOptions, RecurrentSizes
from octavo.models.blocks import GatedLayer, RotaryAttention, SandwichLayer
from octavo.models.hybrid import ATTENTION, HybridConfig, HybridDecoder, read_kinds, read_limits, read_mamba

ARCHITECTURES = ("GraniteMoeHybridForCausalLM",)


@dataclass(frozen=True, kw_only=True)
class GraniteMoeHybridConfig(HybridConfig):
    """Positions are told to attention only where `position_embedding_type` is rope."""

    sizes: RecurrentSizes
    options: MambaOptions

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("hidden_act", "silu")
        c.expect("num_local_experts", 0, default=0)
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
            intermediate_size=c.positive("shared_intermediate_size"),
            qkv_bias=bias,
            out_bias=bias,
            gate_up_reads=("input_linear",),
            embedding_multiplier=c.float("embedding_multiplier", 1.0),
            attention_scale=c.float("attention_multiplier", 1.0),
            residual_multiplier=c.float("residual_multiplier", 1.0),
            logit_multiplier=1.0 / c.positive_float("logits_scaling", 1.0),
            windows=(),
            kinds=read_kinds(c),
            sizes=sizes,
            eps=c.float("rms_norm_eps", 1e-6),
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

        scaled = partial(SandwichLayer, after=lambda c: Elementwise("scaled", c.residual_multiplier))
        super().__init__(c, mesh, attention=mixer, layer=scaled if c.residual_multiplier != 1 else GatedLayer)


MODEL = GraniteMoeHybridForCausalLM
