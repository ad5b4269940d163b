"""Names of tensors of encoders in older checkpoints, as transformers' classes have them today."""

from __future__ import annotations

import re
from typing import Final

_ALL: Final = (
    (re.compile(r"^(?:model\.)?vision_tower\.vision_model\."), "vision_tower."),
    (re.compile(r"^mlp_AR\."), "projector."),
)
"""Beginnings of names, and what stands there today."""
_DEEPSEEK_OCR: Final = tuple(
    (re.compile(rf"^(?:model\.)?{old}"), own)
    for old, own in (
        (r"projector\.layers\.", "multi_modal_projector."),
        ("view_seperator$", "view_separator"),
        (r"qwen2_model\.query_(\d+)\.", r"vision_tower.query_\1_resolution."),
        (r"qwen2_model\.model\.model\.", "vision_tower.vision_encoder."),
        (r"vision_model\.transformer\.", "vision_model.encoder."),
        (r"vision_model\.", "vision_tower.vision_encoder."),
        (r"sam_model\.blocks\.(\d+)\.norm([12])\.", r"sam_model.layers.\1.layer_norm\2."),
        (r"sam_model\.blocks\.", "sam_model.layers."),
        (r"sam_model\.patch_embed\.proj\.", "sam_model.patch_embed.projection."),
        (r"sam_model\.neck\.0\.", "sam_model.neck.conv1."),
        (r"sam_model\.neck\.1\.", "sam_model.neck.layer_norm1."),
        (r"sam_model\.neck\.2\.", "sam_model.neck.conv2."),
        (r"sam_model\.neck\.3\.", "sam_model.neck.layer_norm2."),
        (r"sam_model\.net_2\.", "sam_model.proj.conv1."),
        (r"sam_model\.net_3\.", "sam_model.proj.conv2."),
        (r"sam_model\.", "vision_tower.sam_encoder."),
    )
)


_DOTS_OCR: Final = tuple(
    (re.compile(rf"^vision_tower\.{old}"), rf"vision_tower.{own}")
    for old, own in (
        (r"patch_embed\.patchifier\.", "patch_embed."),
        (r"post_trunk_norm\.", "norm."),
        (r"blocks\.(\d+)\.mlp\.fc1\.", r"blocks.\1.mlp.gate_proj."),
        (r"blocks\.(\d+)\.mlp\.fc2\.", r"blocks.\1.mlp.down_proj."),
        (r"blocks\.(\d+)\.mlp\.fc3\.", r"blocks.\1.mlp.up_proj."),
    )
)


def todays_name(architecture: str, name: str) -> str:
    """Return the name of a stored tensor in the class of an architecture, with what is before all names or without."""
    family = architecture.lower()
    table = _DOTS_OCR if family.startswith("dotsocr") else _ALL
    for old, own in _DEEPSEEK_OCR if family.startswith("deepseekocr") else table:
        name = old.sub(own, name)
    return name
