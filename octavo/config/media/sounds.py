"""Which checkpoints have sounds read in the place of tokens, and the part of the config with their encoder."""

from __future__ import annotations

from octavo.config.checkpoint import Checkpoint
from octavo.config.media.images import PROCESSOR_FILES
from octavo.config.media.media_families import media_family
from octavo.config.section import Section


def sound_section(checkpoint: Checkpoint) -> Section | None:
    """Return what config.json says of the encoder of sounds; None for a checkpoint without one.

    Raises CheckpointError for a damaged config, and UnsupportedModel for another encoder than that of the family.
    """
    family = media_family(checkpoint.architecture)
    files = [checkpoint.path / name for name in PROCESSOR_FILES]
    if not family.sounds or (family.needs_settings and not any(file.is_file() for file in files)):
        return None
    return family.sound_part(checkpoint.stored)
