"""Cohere's Command R, R7B and A: attention and MLP beside each other, behind one LayerNorm.

R7B and A have windows in three of four layers, and no rotation in the others.
Sources: Cohere's releases, https://arxiv.org/abs/2504.00698.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.layers.norm import LayerNorm
from octavo.models.blocks import GatedDecoder, ParallelLayer, RotaryAttention, head_layer_norms
from octavo.models.config import DecoderConfig, read_windows

ARCHITECTURES = ("Cohere2ForCausalLM", "CohereForCausalLM")


@dataclass(frozen=True, kw_only=True)
class CohereConfig(DecoderConfig):
    """Heads turn in neighbouring pairs; in large models queries and keys have norms with weights for each head."""

    has_head_norms: bool = False

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("hidden_act", "silu")
        bias = c.bool("attention_bias", False)
        has_windows = c.architecture.lower().startswith("cohere2")
        windows = read_windows(c, is_windowed=True, default=4096, pattern=4) if has_windows else ()
        config = cls.common(
            c,
            interleaved=True,
            norm=partial(LayerNorm, bias=False),
            norm_eps=c.positive_float("layer_norm_eps", 1e-5),
            tied=c.bool("tie_word_embeddings", True),
            qkv_bias=bias,
            out_bias=bias,
            logit_multiplier=c.float("logit_scale", 0.0625),
            windows=windows,
            has_head_norms=not has_windows and c.bool("use_qk_norm", False),
        )
        if not has_windows:
            return config
        full = windows or (None,) * config.num_layers
        return replace(config, ropes=tuple(None if window is None else config.rope for window in full))


class CohereForCausalLM(GatedDecoder):
    """The whole model."""

    Config = CohereConfig

    def __init__(self, c: CohereConfig, mesh: Mesh) -> None:
        def attention(layer: int) -> RotaryAttention:
            return RotaryAttention(c, mesh, layer, head_layer_norms(c, mesh) if c.has_head_norms else None)

        super().__init__(c, mesh, attention, layer=ParallelLayer)


MODEL = CohereForCausalLM
