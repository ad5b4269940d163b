"""Names of tensors in Mistral's releases, those in transformers' classes, and how names become others."""

from __future__ import annotations

import re
from typing import Final

Renamed = tuple[tuple[re.Pattern[str], str], ...]
"""Patterns in names of tensors and what stands in their place, in the order in which they are replaced."""


def renamed(begin: str, *pairs: tuple[str, str]) -> Renamed:
    """Return patterns that `begin` precedes; the text in the group of `begin`, if it has one, stays."""
    kept = r"\1" if re.compile(begin).groups else ""
    return tuple((re.compile(begin + old), kept + own) for old, own in pairs)


def own_name(name: str, patterns: Renamed) -> str:
    """Return what stands in the place of a name."""
    for old, own in patterns:
        name = old.sub(own, name)
    return name


def _parts(start: str, **names: str) -> list[tuple[str, str]]:
    return [(rf"^({start}\..*)\.{old}\.", rf"\1.{own}_proj.") for old, own in names.items()]


_TEXT: Final = renamed(
    "",
    (r"^tok_embeddings\.", "embed_tokens."),
    (r"^output\.", "lm_head."),
    (r"^lerope\.", "rotary_emb."),
    (r"^(layers\.\d+)\.attention\.", r"\1.self_attn."),
    (r"^(layers\.\d+)\.feed_forward\.", r"\1.mlp."),
    (r"^(layers\.\d+)\.(gate|experts|shared_experts)\.", r"\1.mlp.\2."),
    (r"^(layers\.\d+)\.attention_norm\.", r"\1.input_layernorm."),
    (r"^(layers\.\d+)\.ffn_norm\.", r"\1.post_attention_layernorm."),
    *_parts("layers", w1="gate", w2="down", w3="up", wq="q", wo="o"),
    (r"^(layers\.\d+\.self_attn)\.w([kv])\.", r"\1.\2_proj."),
    (r"^(layers\.\d+\.self_attn)\.wq_([ab])\.", r"\1.q_\2_proj."),
    (r"^(layers\.\d+\.self_attn)\.q_a_norm\.", r"\1.q_a_layernorm."),
    (r"^(layers\..*)\.wkv_a_with_mqa\.", r"\1.kv_a_proj_with_mqa."),
    (r"^(layers\..*)\.wkv_b\.", r"\1.kv_b_proj."),
    (r"^(layers\..*)\.kv_a_norm\.", r"\1.kv_a_layernorm."),
    (r"\.ssmax_scaling\.s$", ".softmax_scaling.scale"),
    (r"\.ssmax_scaling\.b$", ".softmax_scaling.bias"),
)
MISTRAL_ENCODER: Final = renamed(
    "",
    (r"^vision_encoder\.", "vision_tower."),
    *_parts("vision_tower", w1="gate", w2="down", w3="up", wv="v", wo="o"),
    (r"^pre_mm_projector_norm\.", "multi_modal_projector.norm."),
    (r"^patch_merger\.", "multi_modal_projector.patch_merger."),
    (r"^vision_language_adapter\.w_in\.", "multi_modal_projector.linear_1."),
    (r"^vision_language_adapter\.w_out\.", "multi_modal_projector.linear_2."),
)
"""Queries and keys keep their names: rows of their heads turn in neighbouring pairs there."""


def text_name(name: str) -> str:
    """Return the name of a tensor of the text model in transformers' classes."""
    return own_name(name, _TEXT)


def native_name(name: str) -> str:
    """Return the name of any tensor, encoders' included, in transformers' classes; for weights without a
    config.json."""
    return own_name(name, (*MISTRAL_ENCODER, *_TEXT))
