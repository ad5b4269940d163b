"""ERNIE 4.5, dense: Llama's block whose heads turn in neighbouring pairs. Source: Baidu's releases."""

from __future__ import annotations

from typing import Self

from octavo.config.checkpoint import Checkpoint
from octavo.models.blocks import GatedDecoder
from octavo.models.config import DecoderConfig

ARCHITECTURES = ("Ernie4_5ForCausalLM",)


class Ernie4_5Config(DecoderConfig):  # noqa: N801
    """One switch for all biases."""

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("hidden_act", "silu")
        bias = c.bool("use_bias", False)
        return cls.common(
            c,
            head_dim=c.positive("head_dim", 128),
            interleaved=True,
            norm_eps=c.positive_float("rms_norm_eps", 1e-5),
            tied=c.bool("tie_word_embeddings", True),
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bias,
        )


class Ernie4_5ForCausalLM(GatedDecoder):  # noqa: N801
    """The whole model."""

    Config = Ernie4_5Config


MODEL = Ernie4_5ForCausalLM
