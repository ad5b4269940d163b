"""Names of tensors in Mistral's releases, and those in transformers' classes."""

from __future__ import annotations

import re
from typing import Final


def _parts(start: str, **names: str) -> list[tuple[str, str]]:
    return [(rf"^({start}\..*)\.{old}\.", rf"\1.{own}_proj.") for old, own in names.items()]


_TEXT: Final = tuple(
    (re.compile(old), own)
    for old, own in (
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
)
MISTRAL_ENCODER: Final = tuple(
    (re.compile(old), own)
    for old, own in (
        (r"^vision_encoder\.", "vision_tower."),
        *_parts("vision_tower", w1="gate", w2="down", w3="up", wv="v", wo="o"),
        (r"^pre_mm_projector_norm\.", "multi_modal_projector.norm."),
        (r"^patch_merger\.", "multi_modal_projector.patch_merger."),
        (r"^vision_language_adapter\.w_in\.", "multi_modal_projector.linear_1."),
        (r"^vision_language_adapter\.w_out\.", "multi_modal_projector.linear_2."),
    )
)
"""Queries and keys keep their names: rows of their heads turn in neighbouring pairs there."""


def text_name(name: str) -> str:
    """Return the name of a tensor of the text model in transformers' classes."""
    for old, own in _TEXT:
        name = old.sub(own, name)
    return name


def native_name(name: str) -> str:
    """Return the name of any tensor, encoders' included, in transformers' classes; for weights without a
    config.json."""
    for old, own in MISTRAL_ENCODER:
        name = old.sub(own, name)
    return text_name(name)
