"""Phi-4-multimodal as Microsoft released it, whose code stands beside its weights, and as transformers has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.config.section import Section

PHI4: Final = "Phi4MultimodalForCausalLM"
"""transformers' name of the architecture."""
RELEASED: Final = "Phi4MMForCausalLM"
IMAGE_ADAPTER: Final = "vision-lora"
"""The folder of the adapter that prompts with images are computed with."""
_IMAGE_TOKEN: Final = 200_010
_AROUND: Final = frozenset({"auto_map", "embd_layer", "img_processor"})
_OF_IMAGES: Final = {
    "embedding_cls": "tune_image",
    "hd_transform_order": "sub_glb",
    "image_token_compression_cls": "avg_pool_2d",
    "projection_cls": "mlp",
    "use_hd_transform": True,
    "with_learnable_separator": True,
}


def phi4_layout(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return a config with the sizes of its encoder of images, and with the token that stands for an image.

    Raises CheckpointError, and UnsupportedModel for values that no release has.
    """
    section = Section(config, where)
    vision = section.section("vision_config")
    if vision is None:
        part = section.section("embd_layer") or Section({}, where)
        layer = part.section("image_embd_layer") or Section({}, where)
        for name, value in _OF_IMAGES.items():
            layer.expect(name, value, default=value)
        side = layer.positive("crop_size", 448)
        vision = Section({"crop_size": side, "image_size": side}, where, "vision_config.")
    return {
        **{name: value for name, value in config.items() if name not in _AROUND},
        "image_token_id": vision.positive("image_token_id", _IMAGE_TOKEN),
        "vision_config": dict(vision.values),
    }


def adapter_files(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the files in folders that a model with this config is served with."""
    names = config.get("architectures")
    names_of_adapter = ("adapter_config.json", "adapter_model.safetensors")
    return tuple(f"{IMAGE_ADAPTER}/{each}" for each in names_of_adapter if names in ([PHI4], [RELEASED]))


def phi4_settings(settings: Section) -> Mapping[str, Any]:
    """Return the settings of the image processor by the names of others. Raises CheckpointError."""
    kept = {name: value for name, value in settings.values.items() if name != "dynamic_hd"}
    return {
        **kept,
        "image_processor_type": "Phi4MultimodalImageProcessor",
        "max_patches": settings.positive("dynamic_hd", 36),
    }
