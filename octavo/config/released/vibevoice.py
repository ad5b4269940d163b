"""What config.json of VibeVoice ASR says of its two encoders of sounds."""

from __future__ import annotations

from math import prod
from typing import Final

from octavo.config.media.encoder_sizes import check_encoder
from octavo.config.section import Section

_ENCODERS: Final = ("acoustic_tokenizer_encoder_config", "semantic_tokenizer_encoder_config")


def vibevoice_sounds(config: Section) -> Section | None:
    """Return the part with the first encoder; None for a checkpoint without encoders. Raises CheckpointError."""
    parts = [config.section(each) for each in _ENCODERS]
    first, second = parts
    if first is None or second is None:
        return None
    for part in parts:
        check_encoder(part)
    if samples_of_vector(first) != samples_of_vector(second):
        raise second.error("downsampling_ratios", f"a product of {samples_of_vector(first)}, as the other encoder has")
    return first


def samples_of_vector(section: Section) -> int:
    """Return the samples that become one vector. Raises CheckpointError."""
    ratios = section.values.get("downsampling_ratios", [2, 2, 4, 5, 5, 8])
    if not isinstance(ratios, list) or not ratios or not all(type(each) is int and 0 < each < 1000 for each in ratios):
        raise section.error("downsampling_ratios", "integers from 1 to 999")
    return prod(ratios)
