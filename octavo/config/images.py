"""Which checkpoints have images read, and the settings of their image processors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.config.checkpoint import Checkpoint, read_json_object
from octavo.config.section import Section

READ_IMAGES: Final = frozenset(
    f"{name}ForConditionalGeneration"
    for name in (
        *("Gemma3", "Gemma4", "Glm46V", "Glm4v", "Glm4vMoe", "Idefics3", "InternVL", "Llava", "LlavaNext"),
        *("LlavaOnevision", "Mistral3", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe"),
        "SmolVLM",
    )
)
"""Architectures whose images are read, with transformers."""

_PROCESSOR: Final = "processor_config.json"
_FILES: Final = ("preprocessor_config.json", _PROCESSOR)


def image_settings(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """Return the settings of the image processor of a checkpoint that has images read; None for one without.

    Raises CheckpointError for a damaged file.
    """
    if checkpoint.architecture not in READ_IMAGES:
        return None
    if checkpoint.image_processor is not None:
        return checkpoint.image_processor
    for name in _FILES:
        file = checkpoint.path / name
        values = read_json_object(file) if file.is_file() else {}
        found = values.get("image_processor", values)
        if isinstance(found, dict) and isinstance(found.get("image_processor_type"), str):
            return {**found, **_merged_patch(checkpoint)}
    return None


def _merged_patch(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the size that Pixtral's processor gives its image processor: sizes of images are multiples of that of
    patches that are merged. Raises CheckpointError."""
    file = checkpoint.path / _PROCESSOR
    values = read_json_object(file) if file.is_file() else {}
    if values.get("processor_class") != "PixtralProcessor":
        return {}
    section = Section(values, str(file))
    size = section.positive("patch_size", 16) * section.positive("spatial_merge_size", 1)
    return {"patch_size": {"height": size, "width": size}}
