"""Which checkpoints have sounds read in the place of tokens, and the part of the config with their encoder."""

from __future__ import annotations

from typing import Final

from octavo.config.checkpoint import Checkpoint
from octavo.config.encoder_sizes import check_encoder
from octavo.config.section import Section

READ_SOUND: Final = frozenset(
    f"{name}ForConditionalGeneration" for name in ("Qwen2Audio", "Qwen2_5Omni", "Qwen3ASR", "Qwen3OmniMoe", "Voxtral")
)
"""Architectures whose sounds are read, with transformers."""


def sound_section(checkpoint: Checkpoint) -> Section | None:
    """Return what config.json says of the encoder of sounds; None for a checkpoint without one.

    Raises CheckpointError for a damaged config.
    """
    if checkpoint.architecture not in READ_SOUND:
        return None
    section = checkpoint.stored.section("audio_config")
    check_encoder(section)
    return section
