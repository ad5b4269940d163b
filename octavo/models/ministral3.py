"""Ministral 3: Llama's block with stretched positions, with which queries grow. Source: Mistral AI's releases."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

from octavo.config.checkpoint import Checkpoint
from octavo.layers.rope import QueryGrowth
from octavo.models.blocks import GatedDecoder
from octavo.models.config import DecoderConfig, read_windows

ARCHITECTURES = ("Ministral3ForCausalLM",)


class Ministral3Config(DecoderConfig):
    """The rotary parameters say how much queries grow: `llama_4_scaling_beta`."""

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("hidden_act", "silu")
        config = cls.common(
            c,
            head_dim=c.positive("head_dim", 128),
            norm_eps=c.positive_float("rms_norm_eps", 1e-5),
            windows=read_windows(c, is_windowed=c.values.get("sliding_window") is not None),
        )
        rope = c.rope()
        if config.rope is None or rope.values.get("llama_4_scaling_beta") is None:
            return config
        growth = QueryGrowth(rope.float("llama_4_scaling_beta"), rope.positive("original_max_position_embeddings"))
        return replace(config, rope=replace(config.rope, query_growth=growth))


class Ministral3ForCausalLM(GatedDecoder):
    """The whole model."""

    Config = Ministral3Config


MODEL = Ministral3ForCausalLM
