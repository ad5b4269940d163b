"""SmolLM3: Llama's block, without rotation in every fourth layer. Source: Hugging Face's releases."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

from octavo.config.checkpoint import Checkpoint
from octavo.models.blocks import GatedDecoder
from octavo.models.config import DecoderConfig, read_windows

ARCHITECTURES = ("SmolLM3ForCausalLM",)


class SmolLM3Config(DecoderConfig):
    """`no_rope_layers` has 1 for layers that rotate, and 0 for those that do not."""

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("hidden_act", "silu")
        if c.values.get("layer_types") is None:
            c.expect("use_sliding_window", False)
        bias = c.bool("attention_bias", False)
        config = cls.common(
            c,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=c.bool("mlp_bias", False),
            tied=c.bool("tie_word_embeddings", True),
            windows=read_windows(c, is_windowed=False),
        )
        interval = c.positive("no_rope_layer_interval", 4)
        turns = c.values.get("no_rope_layers") or [
            int((layer + 1) % interval != 0) for layer in range(config.num_layers)
        ]
        if not isinstance(turns, list) or len(turns) != config.num_layers or any(each not in (0, 1) for each in turns):
            raise c.error("no_rope_layers", f"1 or 0 for each of {config.num_layers} layers")
        return replace(config, ropes=tuple(config.rope if each else None for each in turns))


class SmolLM3ForCausalLM(GatedDecoder):
    """The whole model."""

    Config = SmolLM3Config


MODEL = SmolLM3ForCausalLM
