"""Which checkpoints have images read, and the settings of their image processors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.config.checkpoint import Checkpoint, read_json_object

READ_IMAGES: Final = frozenset(
    f"{name}ForConditionalGeneration"
    for name in (
        *("Gemma3", "Gemma4", "Idefics3", "InternVL", "Llava", "LlavaNext", "LlavaOnevision", "Mistral3"),
        *("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe", "SmolVLM"),
    )
)
"""Architectures whose images are read, with transformers."""

_FILES: Final = ("preprocessor_config.json", "processor_config.json")


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
            return found
    return None
