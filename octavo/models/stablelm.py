"""StableLM: LayerNorms around rotary attention, and a quarter of each head turns.

Source: https://arxiv.org/abs/2402.17834.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.norm import LayerNorm
from octavo.models.blocks import GatedDecoder, GatedLayer, ParallelLayer, RotaryAttention, head_layer_norms
from octavo.models.config import DecoderConfig

ARCHITECTURES = ("StableLmForCausalLM",)


@dataclass(frozen=True, kw_only=True)
class StableLmConfig(DecoderConfig):
    """Attention and MLP may stand beside each other, and each head of queries and keys may have a norm of its own."""

    has_head_norms: bool = False
    is_parallel: bool = False

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("hidden_act", "silu")
        return cls.common(
            c,
            rotary_share=0.25,
            norm=LayerNorm,
            norm_eps=c.positive_float("layer_norm_eps", 1e-5),
            qkv_bias=c.bool("use_qkv_bias", False),
            has_head_norms=c.bool("qk_layernorm", False),
            is_parallel=c.bool("use_parallel_residual", False),
        )


class StableLmForCausalLM(GatedDecoder):
    """The whole model."""

    Config = StableLmConfig
    RENAMED: ClassVar[Mapping[str, str]] = {"q_norm": "q_layernorm", "k_norm": "k_layernorm"}

    def __init__(self, c: StableLmConfig, mesh: Mesh) -> None:
        def attention(layer: int) -> RotaryAttention:
            norms = head_layer_norms(c, mesh, is_apart=True) if c.has_head_norms else None
            return RotaryAttention(c, mesh, layer, norms)

        super().__init__(c, mesh, attention, layer=ParallelLayer if c.is_parallel else GatedLayer)


MODEL = StableLmForCausalLM
