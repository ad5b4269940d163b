"""Molmo 2, whose code stands beside its weights: the parts of its config as transformers' class calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from octavo.config.section import Section

_OF_ENCODER: Final = {
    "image_default_input_size": "image_size",
    "image_num_pos": "num_position_embeddings",
    "image_patch_size": "patch_size",
}
"""Names in the releases, and those of today."""
_LAYERS: Final = [-3, -9]
_OF_PROMPTS: Final = {
    "image_use_col_tokens": True,
    "use_single_crop_start_token": True,
}
"""How images are written, with what holds where the processor's file is silent."""


def molmo2_layout(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the config of a release whose encoder has the layers that are read, and no others.

    Raises CheckpointError, and UnsupportedModel for values that no release has.
    """
    section = Section(config, where)
    vision, adapter = section.section("vit_config"), section.part("adapter_config")
    adapter.expect("pooling_attention_mask", True, default=True)
    if vision is None or "vision_config" in config:
        return config
    depth, read = vision.positive("num_hidden_layers", 27), adapter.values.get("vit_layers") or _LAYERS
    if not isinstance(read, list) or not all(type(each) is int and -depth <= each < depth for each in read):
        raise adapter.error("vit_layers", f"numbers of the {depth} layers of the encoder")
    layers = [each % depth for each in read]
    sizes = {_OF_ENCODER.get(name, name): value for name, value in vision.values.items() if name != "model_type"}
    kept = {name: value for name, value in adapter.values.items() if name not in ("model_type", "vit_layers")}
    return {
        **{name: value for name, value in config.items() if name not in ("auto_map", "vit_config")},
        "adapter_config": {**kept, "vision_feature_layer": layers},
        "vision_config": {**sizes, "num_hidden_layers": max(layers) + 1},
    }


def molmo2_settings(config: Section, read: Callable[[str], Section]) -> Mapping[str, Any] | None:
    """Return the settings of the image processor, and of how images are written; None where no file has any.

    read: returns what a file of the checkpoint has. Raises CheckpointError or UnsupportedModel.
    """
    processor = read("processor_config.json")
    found = processor.section("image_processor") or read("preprocessor_config.json")
    if "image_processor_type" not in found.values:
        return None
    vision = config.part("vision_config")
    patch: int = found.expect("patch_size", vision.positive("patch_size", 14), default=14)
    sides = vision.values.get("image_size") or [378, 378]
    size = found.part("size")
    if [size.positive(name, 378) for name in ("height", "width")] != sides or sides[0] != sides[1]:
        raise found.error("size", f"the square image_size of vision_config, {sides}")
    if sides[0] % patch or (sides[0] // patch) ** 2 != vision.positive("num_position_embeddings", 729):
        raise vision.error(
            "num_position_embeddings", f"as many as an image of {sides[0]} pixels has patches of {patch}"
        )
    written = {name: processor.bool(name, default) for name, default in _OF_PROMPTS.items()}
    low = "use_single_crop_col_tokens"
    written[low] = written["image_use_col_tokens"] if processor.values.get(low) is None else processor.bool(low, True)
    return {**found.values, **written, "image_processor_type": "Molmo2ImageProcessor"}
