"""OLMo 2 and 3: norms behind attention and MLP, and over all heads of queries and of keys.

OLMo 3 has windows in three of four layers, whose rotation is not stretched.
Sources: https://arxiv.org/abs/2501.00656, https://arxiv.org/abs/2512.13961.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Self

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.models.blocks import GatedDecoder, LateNormLayer, RotaryAttention, width_norms
from octavo.models.config import DecoderConfig, read_windows

ARCHITECTURES = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")


class Olmo2Config(DecoderConfig):
    """Older configs of OLMo 3 state one rotation; it is stretched in the layers that see all tokens."""

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("hidden_act", "silu")
        bias = c.bool("attention_bias", False)
        has_windows = c.architecture.lower().startswith("olmo3")
        windows = read_windows(c, is_windowed=True, default=4096, pattern=4) if has_windows else ()
        config = cls.common(
            c, norm_eps=c.positive_float("rms_norm_eps", 1e-5), qkv_bias=bias, out_bias=bias, windows=windows
        )
        if config.rope is None or config.ropes or not windows:
            return config
        plain = replace(config.rope, scaling=None)
        return replace(config, ropes=tuple(config.rope if window is None else plain for window in windows))


class Olmo2ForCausalLM(GatedDecoder):
    """The whole model."""

    Config = Olmo2Config
    RENAMED: ClassVar[Mapping[str, str]] = {
        "attention_output_norm": "post_attention_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    }
    carries_residual = False

    def __init__(self, c: Olmo2Config, mesh: Mesh) -> None:
        super().__init__(
            c, mesh, lambda layer: RotaryAttention(c, mesh, layer, width_norms(c, mesh)), layer=LateNormLayer
        )


MODEL = Olmo2ForCausalLM
