"""EXAONE 4: norms behind attention and MLP, and on each head; layers that see all tokens do not rotate.

Source: https://arxiv.org/abs/2507.11407.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Self

from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.models.blocks import GatedDecoder, LateNormLayer
from octavo.models.config import DecoderConfig, read_windows

ARCHITECTURES = ("Exaone4ForCausalLM",)


class Exaone4Config(DecoderConfig):
    """`sliding_window` null means that all layers see all tokens, and rotate."""

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("hidden_act", "silu")
        is_windowed = c.values.get("sliding_window", 4096) is not None
        if c.values.get("layer_types") is None and isinstance(c.values.get("sliding_window_pattern"), str):
            raise c.error("layer_types", "the kind of each layer, where sliding_window_pattern is a string")
        windows = read_windows(c, is_windowed=is_windowed, default=4096, pattern=4 if is_windowed else None)
        config = cls.common(c, norm_eps=c.positive_float("rms_norm_eps", 1e-5), qk_norm=True, windows=windows)
        if not is_windowed:
            return config
        full = windows or (None,) * config.num_layers
        return replace(config, ropes=tuple(None if window is None else config.rope for window in full))


class Exaone4ForCausalLM(GatedDecoder):
    """The whole model."""

    Config = Exaone4Config
    RENAMED: ClassVar[Mapping[str, str]] = {
        "attention_output_norm": "post_attention_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    }
    carries_residual = False

    def __init__(self, c: Exaone4Config, mesh: Mesh) -> None:
        super().__init__(c, mesh, layer=LateNormLayer)


MODEL = Exaone4ForCausalLM
