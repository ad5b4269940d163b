"""Gemma 1 to 3, and VaultGemma."""

from __future__ import annotations

from typing import Any

from octavo.config.checkpoint import Checkpoint
from octavo.config.section import shown
from octavo.errors import UnsupportedModel
from octavo.models.blocks import SandwichLayer, head_norms
from octavo.models.config import read_windows
from octavo.models.fields import Read, fields, read_cap
from octavo.models.gemma_parts import BETWEEN_NORMS, GELU, GemmaConfig, GemmaDecoder, read_attention_scale


class GemmaForCausalLM(GemmaDecoder):
    """Gemma: Llama's block with gated GELU. Source: https://arxiv.org/abs/2403.08295.

    The first configs call the activation gelu; models compute its approximation by tanh.
    """

    @classmethod
    def read(cls, c: Checkpoint) -> GemmaConfig:
        c.expect("hidden_act", GELU, "gelu")
        return super().read(c)


class Gemma2ForCausalLM(GemmaDecoder):
    """Gemma 2: norms before and behind attention and MLP, a window in every other layer, soft caps.

    Scores and logits have caps unless the config has null in their place. Source: https://arxiv.org/abs/2408.00118.
    """

    RENAMED = BETWEEN_NORMS
    FIELDS = fields(
        windows=Read(read_windows, is_windowed=True),
        attention_scale=Read(read_attention_scale),
        attention_soft_cap=Read(read_cap, "attn_logit_softcapping", 50.0),
        logit_soft_cap=Read(read_cap, "final_logit_softcapping", 30.0),
        layer=SandwichLayer,
    )


class VaultGemmaForCausalLM(Gemma2ForCausalLM):
    """VaultGemma: Gemma 2 with norms before attention and MLP alone. Source: https://arxiv.org/abs/2510.15001."""

    RENAMED = {"post_attention_layernorm": "pre_feedforward_layernorm"}
    FIELDS = {**Gemma2ForCausalLM.FIELDS, "layer": None}


def _sees_both(c: Checkpoint) -> bool:
    return c.values.get("use_bidirectional_attention") is True


def _half_windows(c: Checkpoint) -> tuple[int | None, ...]:
    windows = read_windows(c, is_windowed=True)
    return tuple(None if each is None else each // 2 + 1 for each in windows) if _sees_both(c) else windows


class Gemma3ForCausalLM(GemmaDecoder):
    """Gemma 3: Gemma 2 with norms of query and key heads, five windows to a layer without, and another rotation there.

    Releases have no cap of scores; transformers does not apply one, either. Of checkpoints that read images, the text
    model. Source: https://arxiv.org/abs/2503.19786. EmbeddingGemma sees half a window to both sides.
    """

    RENAMED = BETWEEN_NORMS
    REFUSED = {"Gemma 3 has no cap of scores; set it to null": ("attn_logit_softcapping",)}
    FIELDS = fields(
        windows=Read(_half_windows),
        is_bidirectional=Read(_sees_both),
        has_whole_spans=True,
        qk_norms=head_norms,
        attention_scale=Read(read_attention_scale),
        logit_soft_cap=Read(read_cap, "final_logit_softcapping", None),
        layer=SandwichLayer,
    )


def _no_windows(c: Checkpoint) -> tuple[int | None, ...]:
    kinds: Any = c.values.get("layer_types") or ["full_attention"]
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise UnsupportedModel(
            f"{c.origin('layer_types')}: layer_types has {shown(kinds)}, expected full_attention alone; chunks of "
            "Rnj-1 are not implemented"
        )
    return ()


class Rnj1ForCausalLM(Gemma3ForCausalLM):
    """Rnj-1: Gemma 3 whose layers all see all tokens, with logits below a soft cap. Source: Essential AI's releases."""

    FIELDS = {**Gemma3ForCausalLM.FIELDS, "windows": Read(_no_windows), "has_whole_spans": False}
