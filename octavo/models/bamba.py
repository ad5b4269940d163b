"""Bamba: Mamba2 in most layers, attention in some. Source: https://huggingface.co/blog/bamba."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import nn

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.recurrent import Mamba2, MambaOptions, RecurrentSizes
from octavo.models.blocks import RotaryAttention
from octavo.models.hybrid import ATTENTION, RECURRENT, HybridConfig, HybridDecoder, read_kinds, read_limits, read_mamba

ARCHITECTURES = ("BambaForCausalLM",)


@dataclass(frozen=True, kw_only=True)
class BambaConfig(HybridConfig):
    """Half of each head turns."""

    sizes: RecurrentSizes
    options: MambaOptions

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("hidden_act", "silu")
        bias, proj_bias = c.bool("attention_bias", False), c.bool("mamba_proj_bias", False)
        sizes, attending = read_mamba(c, c.positive("hidden_size")), c.values.get("attn_layer_indices") or []
        if not isinstance(attending, list):
            raise c.error("attn_layer_indices", "a list of layers")
        kinds = [ATTENTION if each in attending else RECURRENT for each in range(c.positive("num_hidden_layers"))]
        return cls.common(
            c,
            rotary_share=0.5,
            norm_eps=c.positive_float("rms_norm_eps", 1e-5),
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=c.bool("mlp_bias", False),
            windows=(),
            kinds=read_kinds(c, kinds),
            sizes=sizes,
            options=MambaOptions(
                bias=proj_bias,
                convolution_bias=c.bool("mamba_conv_bias", True),
                out_bias=proj_bias,
                limits=read_limits(c),
                norm_groups=sizes.key_heads,
            ),
            eps=c.positive_float("rms_norm_eps", 1e-5),
        )


class BambaForCausalLM(HybridDecoder):
    """The whole model."""

    Config = BambaConfig
    RECURRENT_NAME = "mamba"
    RENAMED: ClassVar[Mapping[str, str]] = {
        "norm": "final_layernorm",
        "mlp": "feed_forward",
        "post_attention_layernorm": "pre_ff_layernorm",
    }

    def __init__(self, c: BambaConfig, mesh: Mesh) -> None:
        def mixer(layer: int) -> nn.Module:
            if c.kinds[layer] == ATTENTION:
                return RotaryAttention(c, mesh, layer)
            return Mamba2(c.sizes, c.hidden_size, c.eps, mesh, c.options)

        super().__init__(c, mesh, attention=mixer)


MODEL = BambaForCausalLM
