"""Gemma 3: Gemma 2 with norms of query and key heads, five windows to a layer without, and another rotation there.

Source: https://arxiv.org/abs/2503.19786. Of checkpoints that read images, the text model.
"""

from __future__ import annotations

from typing import Self

from octavo.config.checkpoint import Checkpoint
from octavo.models.config import read_windows
from octavo.models.gemma_parts import BETWEEN_NORMS, GELU, GemmaBaseConfig, GemmaDecoder, read_attention_scale, read_cap

ARCHITECTURES = ("Gemma3ForCausalLM",)


class Gemma3Config(GemmaBaseConfig):
    """Releases have no cap of scores; transformers does not apply one, either."""

    @classmethod
    def read(cls, c: Checkpoint) -> Self:
        c.expect("hidden_activation", GELU)
        c.refuse("attn_logit_softcapping", because="Gemma 3 has no cap of scores; set it to null")
        return cls.gemma(
            c,
            qk_norm=True,
            windows=read_windows(c, is_windowed=True),
            attention_scale=read_attention_scale(c),
            logit_soft_cap=read_cap(c, "final_logit_softcapping", None),
        )


class Gemma3ForCausalLM(GemmaDecoder):
    """The whole model."""

    Config = Gemma3Config
    RENAMED = BETWEEN_NORMS


MODEL = Gemma3ForCausalLM
