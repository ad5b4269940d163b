"""Phi-3-vision and Phi-3.5-vision, whose code stands beside their weights, with the config of their encoder: CLIP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.config.section import Section

_IMAGE_TOKEN: Final = 32_044
_CLIP: Final[Mapping[str, Any]] = {
    "hidden_act": "quick_gelu",
    "hidden_size": 1024,
    "image_size": 336,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "patch_size": 14,
    "projection_dim": 768,
}
"""CLIP ViT-L/14 of 336 pixels, which the config names alone."""
_OF_EMBEDDINGS: Final = {
    "embedding_cls": "image",
    "hd_transform_order": "sub_glb",
    "projection_cls": "mlp",
    "use_hd_transform": True,
    "with_learnable_separator": True,
}


def phi3v_layout(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return a config with the sizes of its encoder, and with the token that stands for an image.

    Raises CheckpointError, and UnsupportedModel for values that no release has.
    """
    section = Section(config, where)
    section.part("embd_layer").expect_all(**_OF_EMBEDDINGS)
    processor = section.part("img_processor")
    processor.expect("name", "clip_vision_model", default="clip_vision_model")
    processor.expect("type_feature", "patch", default="patch")
    vision = section.section("vision_config")
    sizes = _CLIP if vision is None else vision.values
    width = sizes.get("hidden_size")
    if isinstance(width, int):
        processor.expect("image_dim_out", width, default=width)
    layer = processor.int("layer_idx", -2)
    depth = Section(sizes, where, "vision_config.").positive("num_hidden_layers", 12)
    if not -depth <= layer + 1 <= depth + 1:
        raise processor.error("layer_idx", f"a layer of the encoder, which has {depth}")
    return {
        **{name: value for name, value in config.items() if name not in ("auto_map", "embd_layer", "img_processor")},
        "image_token_id": section.positive("image_token_id", _IMAGE_TOKEN),
        "vision_config": {**sizes, "model_type": "clip_vision_model"},
        "vision_feature_layer": layer,
    }
