"""From the architecture that a checkpoint names to the file that implements it.

A model file states `ARCHITECTURES`, the names that it implements, and `MODEL`, its class; the folder is the registry.
A file is named after the `model_type` of its family, which selects it where config.json names no architecture.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any, Final, Protocol

import octavo.models
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.errors import UnsupportedModel
from octavo.models.config import DecoderConfig
from octavo.models.decoder import DecoderStack
from octavo.models.fallback.library import INSTALL, find_class, library_version

_AROUND_A_TEXT_MODEL: Final = frozenset(
    f"{name}ForConditionalGeneration"
    for name in (
        *("Cohere2Vision", "Gemma3", "Gemma4", "Idefics3", "InternVL", "KimiK25", "KimiVL", "Lfm2Vl", "Llava"),
        *("LlavaNext", "LlavaOnevision", "Mistral3", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Qwen3_5"),
        *("Qwen3_5Moe", "SmolVLM", "Voxtral"),
    )
)
"""Architectures that read images or sound, and whose text model alone is the family that `text_config` names."""
_FAMILY_OF_TYPE: Final = {
    "cohere2": "cohere",
    "glm4": "glm",
    "kimi_k2": "deepseek_v3",
    "lfm2_moe": "lfm2",
    "ministral": "mistral",
    "olmo3": "olmo2",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}
"""Families by `model_type`, without `_text`, where the two differ."""


class ModelClass(Protocol):
    """The class of a family: a `DecoderStack` that is made from its config."""

    Config: type[DecoderConfig]

    def __call__(self, config: Any, mesh: Mesh) -> DecoderStack:
        """Make the part of the model that the mesh's rank has."""
        ...


def resolve_model(checkpoint: Checkpoint) -> ModelClass:
    """Return the class for the checkpoint's architecture: a family's, else what runs a class of transformers.

    Raises UnsupportedModel, which names the families that are there.
    """
    wanted = checkpoint.architecture
    names = [_FAMILY_OF_TYPE.get(wanted.removesuffix("_text"), wanted.removesuffix("_text"))]
    if wanted in _AROUND_A_TEXT_MODEL and checkpoint.text_model_type is not None:
        names.append(_FAMILY_OF_TYPE.get(checkpoint.text_model_type, checkpoint.text_model_type))
    for name in names:
        for module in _model_files(name):
            if name in module.ARCHITECTURES or module.__name__.endswith(f".{name}"):
                model: ModelClass = module.MODEL
                return model
    without = f"; with transformers there are more: {INSTALL}" if library_version() is None else ""
    own_code = (
        "; its auto_map names code in its directory, which octavo does not run"
        if "auto_map" in checkpoint.values
        else ""
    )
    if library_version() is not None and find_class(checkpoint) is not None:
        fallback: ModelClass = import_module("octavo.models.fallback.model").MODEL
        return fallback
    raise UnsupportedModel(
        f"{checkpoint.where}: there is no model family {_family(wanted)} yet (architecture {wanted}); "
        f"the families that are there: {', '.join(map(_family, known_architectures()))}{without}{own_code}"
    )


def _family(architecture: str) -> str:
    """Return the family of an architecture: `Gemma2` of `Gemma2ForCausalLM`."""
    return re.sub(r"(For[A-Z]\w+|LMHeadModel|Model)$", "", architecture) or architecture


def known_architectures() -> list[str]:
    """Return all architectures that some file implements, sorted."""
    return sorted(name for module in _model_files("") for name in module.ARCHITECTURES)


def _model_files(architecture: str) -> Iterator[ModuleType]:
    """Yield the files that state architectures, the most likely first, so that few of them are imported."""
    names = [each.name for each in pkgutil.iter_modules(octavo.models.__path__)]
    likely = architecture.lower()
    names.sort(key=lambda name: (-len(name) if likely.startswith(name.replace("_", "")) else 0, name))
    for name in names:
        module = import_module(f"octavo.models.{name}")
        if hasattr(module, "ARCHITECTURES"):
            yield module
