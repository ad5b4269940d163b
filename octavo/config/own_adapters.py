"""Adapters that a checkpoint has in its own folder, for prompts that bring more than text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from octavo.config.checkpoint import Checkpoint
from octavo.config.media.images import image_settings
from octavo.config.media.media_families import media_family
from octavo.config.media.sounds import sound_section
from octavo.config.media_args import media_limits
from octavo.config.released.phi4 import ADAPTERS, PHI4, RELEASED
from octavo.config.section import Section, read_json_object

if TYPE_CHECKING:
    from octavo.config.args import EngineArgs

_FILE: Final = "adapter_config.json"
_KINDS: Final = ("image", "audio")


class OwnAdapter(NamedTuple):
    """The folder of an adapter, and the largest rank of its matrices."""

    path: Path
    rank: int


def own_adapter(checkpoint: Checkpoint, kind: str) -> OwnAdapter | None:
    """Return the adapter that a checkpoint has for prompts with inputs of a kind; None for one without.

    Raises CheckpointError where it is stated and not there.
    """
    stored = checkpoint.stored
    file, key, absent = checkpoint.path / _FILE, "has_lora_adapter", "false"
    if checkpoint.architecture in (PHI4, RELEASED):
        folder, key = ADAPTERS[kind]
        file, absent = checkpoint.path / folder / _FILE, "null"
        is_read = image_settings(checkpoint) if kind == "image" else sound_section(checkpoint)
        if stored.values.get(key, True) is None or is_read is None:
            return None
    elif kind != "audio" or media_family(checkpoint.architecture).sounds != "granite" or not stored.bool(key, True):
        return None
    if not file.is_file():
        name = file.relative_to(checkpoint.path)
        raise stored.error(key, f"{absent} where {name} is not in the folder; download the model again")
    values = read_json_object(file)
    ranks = values.get("rank_pattern")
    own = [each for each in ranks.values() if isinstance(each, int)] if isinstance(ranks, dict) else []
    return OwnAdapter(file.parent, max([Section(values, str(file)).positive("r", 8), *own]))


def own_adapter_files(checkpoint: Checkpoint) -> list[Path]:
    """Return the files of all adapters that a checkpoint has in its folder. Raises CheckpointError."""
    found = [own.path for kind in _KINDS if (own := own_adapter(checkpoint, kind)) is not None]
    return [folder / name for folder in found for name in (_FILE, "adapter_model.safetensors")]


def own_adapters(checkpoint: Checkpoint, limits: Mapping[str, int]) -> list[OwnAdapter]:
    """Return the adapters that a checkpoint has for what prompts may bring. limits: by kind. Raises CheckpointError."""
    return [own for kind in _KINDS if limits[kind] and (own := own_adapter(checkpoint, kind)) is not None]


def for_own_adapters(args: EngineArgs, checkpoint: Checkpoint) -> EngineArgs:
    """Return the arguments with room for the adapters that a checkpoint has for what prompts bring. Raises
    CheckpointError."""
    found = own_adapters(checkpoint, media_limits(args))
    if not found:
        return args
    return replace(args, enable_lora=True, max_lora_rank=max(args.max_lora_rank, *(own.rank for own in found)))
