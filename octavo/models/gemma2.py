"""Gemma 2: norms before and behind attention and MLP, a window in every other layer, soft caps.

Source: https://arxiv.org/abs/2408.00118.
"""

from __future__ import annotations

from typing import Self

from octavo.config.checkpoint import Checkpoint
from octavo.models.config import read_windows
from octavo.models.gemma_parts import BETWEEN_NORMS, GELU, GemmaBaseConfig, GemmaDecoder, read_attention_scale, read_cap

ARCHITECTURES = ("Gemma2ForCausalLM",)


class Gemma2Config(GemmaBaseConfig):
    """Scores and logits have caps unless the config has null in their place."""

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("hidden_activation", GELU)
        return cls.gemma(
            c,
            windows=read_windows(c, is_windowed=True),
            attention_scale=read_attention_scale(c),
            attention_soft_cap=read_cap(c, "attn_logit_softcapping", 50.0),
            logit_soft_cap=read_cap(c, "final_logit_softcapping", 30.0),
        )


class Gemma2ForCausalLM(GemmaDecoder):
    """The whole model."""

    Config = Gemma2Config
    RENAMED = BETWEEN_NORMS


MODEL = Gemma2ForCausalLM
