"""How MiniCPM-o reads sounds: windows of Whisper's spectrogram, and tokens around each second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from octavo.config.section import Section
from octavo.core.media import MediaInput
from octavo.multimodal.placeholders import Words
from octavo.multimodal.processors.gemma_sounds import Around
from octavo.multimodal.processors.log_mel import LogMel
from octavo.multimodal.sound import Samples, sound_input, too_short

WORDS: Final = Words("(<audio>./</audio>)", "<|audio_start|>", "<unk>")
"""The first of the tokens begins each second."""
_SECOND: Final = 50
"""Vectors of a second before they are pooled."""


def _num_pooled(num_frames: int, pooled: int) -> int:
    return ((num_frames - 1) // 2 + 1) // pooled


def minicpm_window(section: Section) -> tuple[int, int]:
    """Return frames and vectors of a window. Raises CheckpointError."""
    count, pooled = section.positive("max_source_positions", 1500), section.positive("audio_pool_step")
    if _SECOND % pooled:
        raise section.error("audio_pool_step", f"a divisor of {_SECOND}, the vectors of a second")
    if count % _SECOND:
        raise section.error("max_source_positions", f"a multiple of {_SECOND}, the vectors of a second")
    return 2 * count, count // pooled


def minicpm_windows(settings: LogMel, section: Section, samples: Samples) -> list[MediaInput]:
    """Return as many windows as the sound begins. Raises InvalidRequest for one of which no vector is made."""
    made, size = [], settings.num_frames * settings.hop_length
    for start in range(0, len(samples), size):
        part = samples[start : start + size]
        num_frames = -(-len(part) // settings.hop_length)
        if num_vectors := _num_pooled(num_frames, section.positive("audio_pool_step")):
            features = np.ascontiguousarray(settings.features(part)[:, :num_frames])
            made.append(sound_input({"input_features": features}, num_vectors))
    if not made:
        raise too_short(samples, settings.sampling_rate, 0.1)
    return made


def minicpm_around(config: Section, encode: Callable[[str], list[int]]) -> Around:
    """Return the tokens that begin and end each second."""
    group = _SECOND // config.positive("audio_pool_step", 2)
    return Around(encode(WORDS.marker), behind=encode("<|audio_end|>"), group=group)
