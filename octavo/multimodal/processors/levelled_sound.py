"""How VibeVoice ASR reads sounds: their samples, brought to one loudness. Source: transformers' feature extractor."""

from __future__ import annotations

from math import ceil
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.config.checkpoint import Checkpoint
from octavo.config.released.vibevoice import samples_of_vector
from octavo.config.section import Section
from octavo.core.media import MediaInput
from octavo.multimodal.processors.log_mel import extractor_settings, sampling_rate
from octavo.multimodal.sound import MAX_SECONDS, Samples, sound_input

MOST_S: Final = MAX_SECONDS - 1.0
"""A sound is encoded at once, and so has to fit into a step."""
DURATION: Final = "<|AUDIO_DURATION|>"
"""What chat templates write for the seconds of a sound."""


class LevelledSamples(msgspec.Struct, frozen=True):
    """The samples of a sound, `size` for a vector, with `level` as the root of their mean square (None: as they are),
    but none beyond 1. seconds: how long one may be. num_vectors: of the longest one."""

    size: int
    sampling_rate: int
    level: float | None
    eps: float
    seconds: float
    num_vectors: int

    @classmethod
    def of(cls, checkpoint: Checkpoint, section: Section) -> LevelledSamples:
        """Read the settings of a checkpoint. section: its encoder in config.json. Raises CheckpointError or
        UnsupportedModel."""
        settings, size = extractor_settings(checkpoint.path), samples_of_vector(section)
        settings.expect_all(feature_size=1, pad_to_multiple_of=size)
        settings.expect("padding_value", 0, default=0)
        stated = {"sampling_rate": 24_000, **settings.values}
        rate, level = sampling_rate(Section(stated, settings.where)), None
        if settings.bool("normalize_audio", True):
            level = float(10.0 ** (settings.float("target_dB_FS", -25.0) / 20.0))
        eps = settings.positive_float("eps", 1e-6)
        return cls(size, rate, level, eps, MOST_S, ceil(MOST_S * rate / size))

    def features(self, samples: Samples) -> NDArray[np.float32]:
        """Return [1, samples], silence behind the sound included."""
        made = samples.astype(np.float32, copy=False)
        if self.level is not None and len(made):
            made = made * np.float32(self.level / (np.sqrt(np.mean(made * made)) + self.eps))
            if (most := np.abs(made).max()) > 1.0:
                made = made / (most + np.float32(self.eps))
        return np.pad(made, (0, -len(made) % self.size)).astype(np.float32, copy=False)[None]


def levelled_sound(settings: LevelledSamples, section: Section, samples: Samples) -> list[MediaInput]:
    """Return the whole sound."""
    features = settings.features(samples)
    return [sound_input({"input_features": features}, features.shape[1] // settings.size)]
