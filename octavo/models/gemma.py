"""Gemma 1 to 3, and VaultGemma."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from octavo.config.checkpoint import Checkpoint
from octavo.models.blocks import SandwichLayer, head_norms
from octavo.models.config import read_windows
from octavo.models.gemma_parts import BETWEEN_NORMS, GELU, GemmaConfig, GemmaDecoder, read_attention_scale, read_cap


class GemmaForCausalLM(GemmaDecoder):
    """Gemma: Llama's block with gated GELU. Source: https://arxiv.org/abs/2403.08295.

    The first configs call the activation gelu; models compute its approximation by tanh.
    """

    @classmethod
    def read(cls, c: Checkpoint) -> GemmaConfig:
        c.expect("hidden_act", GELU, "gelu")
        c.expect("hidden_activation", GELU)
        return GemmaConfig.gemma(c)


class Gemma2ForCausalLM(GemmaDecoder):
    """Gemma 2: norms before and behind attention and MLP, a window in every other layer, soft caps.

    Scores and logits have caps unless the config has null in their place. Source: https://arxiv.org/abs/2408.00118.
    """

    RENAMED = BETWEEN_NORMS

    @classmethod
    def read(cls, c: Checkpoint) -> GemmaConfig:
        c.expect("hidden_activation", GELU)
        return GemmaConfig.gemma(
            c,
            windows=read_windows(c, is_windowed=True),
            attention_scale=read_attention_scale(c),
            attention_soft_cap=read_cap(c, "attn_logit_softcapping", 50.0),
            logit_soft_cap=read_cap(c, "final_logit_softcapping", 30.0),
            layer=SandwichLayer,
        )


class VaultGemmaForCausalLM(Gemma2ForCausalLM):
    """VaultGemma: Gemma 2 with norms before attention and MLP alone. Source: https://arxiv.org/abs/2510.15001."""

    RENAMED: ClassVar[Mapping[str, str]] = {"post_attention_layernorm": "pre_feedforward_layernorm"}

    @classmethod
    def read(cls, c: Checkpoint) -> GemmaConfig:
        return replace(super().read(c), layer=None)


class Gemma3ForCausalLM(GemmaDecoder):
    """Gemma 3: Gemma 2 with norms of query and key heads, five windows to a layer without, and another rotation there.

    Releases have no cap of scores; transformers does not apply one, either. Of checkpoints that read images, the text
    model. Source: https://arxiv.org/abs/2503.19786. EmbeddingGemma sees half a window to both sides.
    """

    RENAMED = BETWEEN_NORMS

    @classmethod
    def read(cls, c: Checkpoint) -> GemmaConfig:
        c.expect("hidden_activation", GELU)
        c.refuse("attn_logit_softcapping", because="Gemma 3 has no cap of scores; set it to null")
        windows, sees_both = read_windows(c, is_windowed=True), c.values.get("use_bidirectional_attention") is True
        if sees_both:
            windows = tuple(None if window is None else window // 2 + 1 for window in windows)
        return GemmaConfig.gemma(
            c,
            is_bidirectional=sees_both,
            has_whole_spans=True,
            qk_norms=head_norms,
            windows=windows,
            attention_scale=read_attention_scale(c),
            logit_soft_cap=read_cap(c, "final_logit_softcapping", None),
            layer=SandwichLayer,
        )
