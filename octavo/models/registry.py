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
from typing import Any, Protocol

import octavo.models
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.errors import UnsupportedModel
from octavo.models.config import DecoderConfig
from octavo.models.decoder import DecoderStack


class ModelClass(Protocol):
    """The class of a family: a `DecoderStack` that is made from its config."""

    Config: type[DecoderConfig]

    def __call__(self, config: Any, mesh: Mesh) -> DecoderStack:
        """Make the part of the model that the mesh's rank has."""
        ...


def resolve_model(checkpoint: Checkpoint) -> ModelClass:
    """Return the class for the checkpoint's architecture. Raises UnsupportedModel, which names the families that are
    there."""
    wanted = checkpoint.architecture
    for module in _model_files(wanted):
        if wanted in module.ARCHITECTURES or module.__name__.endswith(f".{wanted}"):
            model: ModelClass = module.MODEL
            return model
    own_code = (
        "; its auto_map names code in its directory, which octavo does not run"
        if "auto_map" in checkpoint.values
        else ""
    )
    raise UnsupportedModel(
        f"{checkpoint.where}: there is no model family {_family(wanted)} yet (architecture {wanted}); "
        f"the families that are there: {', '.join(map(_family, known_architectures()))}{own_code}"
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
    names.sort(key=lambda name: (-len(name) if likely.startswith(name) else 0, name))
    for name in names:
        module = import_module(f"octavo.models.{name}")
        if hasattr(module, "ARCHITECTURES"):
            yield module
