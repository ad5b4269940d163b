"""How Nemotron Omni reads sounds: the spectrogram of Parakeet in numpy, each band of half a minute normalised."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.config.checkpoint import Checkpoint
from octavo.config.media.listeners import RATE, num_parakeet_vectors
from octavo.config.section import Section, read_section
from octavo.core.media import MediaInput
from octavo.multimodal.processors.gemma_sounds import Around
from octavo.multimodal.sound import Samples, sound_input

_WIDTH: Final = 400
_HOP: Final = 160
_SPECTRUM: Final = 512
"""Samples of a window, between two, and of its transform."""
_PREEMPHASIS: Final = 0.97
_LEAST: Final = RATE // 10
"""Samples of the shortest piece, which silence fills up."""


class ParakeetMel(msgspec.Struct, frozen=True, dict=True):
    """num_frames, num_vectors: of the longest piece of a sound, which is encoded by itself."""

    bands: int
    num_frames: int = 30 * RATE // _HOP
    num_vectors: int = num_parakeet_vectors(30 * RATE)
    sampling_rate: int = RATE

    @classmethod
    def of(cls, checkpoint: Checkpoint, section: Section) -> ParakeetMel:
        """Read the settings of a checkpoint. section: its encoder in config.json. Raises CheckpointError or
        UnsupportedModel."""
        bands = section.positive("num_mel_bins", 80)
        processor = read_section(checkpoint.path / "processor_config.json", may_lack=True)
        for settings in (section, processor.part("feature_extractor")):
            settings.expect_all(sampling_rate=RATE, hop_length=_HOP, win_length=_WIDTH, n_fft=_SPECTRUM)
            settings.expect_all(preemphasis=_PREEMPHASIS, feature_size=bands)
        return cls(bands)

    @property
    def seconds(self) -> float:
        """The length of the longest piece, in seconds."""
        return self.num_frames * _HOP / self.sampling_rate

    @cached_property
    def _filters(self) -> NDArray[np.float32]:
        from transformers.audio_utils import mel_filter_bank

        return mel_filter_bank(
            *(_SPECTRUM // 2 + 1, self.bands, 0.0, self.sampling_rate / 2, self.sampling_rate),
            norm="slaney",
            mel_scale="slaney",
        ).astype(np.float32)

    def features(self, samples: Samples) -> NDArray[np.float32]:
        """Return [frames, bands] of a piece of at least two frames, one for each hop; of less, [0, bands]."""
        count, filters = len(samples) // _HOP, self._filters
        if count < 2:
            return np.empty((0, self.bands), np.float32)
        samples = samples.astype(np.float32)
        samples[1:] -= np.float32(_PREEMPHASIS) * samples[:-1]
        samples = np.pad(samples, _WIDTH // 2)  # a frame lies around its sample
        places = np.arange(count)[:, None] * _HOP + np.arange(_WIDTH)
        spectrum = np.fft.rfft(samples[places] * np.hanning(_WIDTH).astype(np.float32), _SPECTRUM)
        made = np.log(np.abs(spectrum).astype(np.float32) ** 2 @ filters + np.float32(2**-24))
        normal = (made - made.mean(0)) / (made.std(0, ddof=1) + np.float32(1e-5))
        return np.ascontiguousarray(normal, np.float32)


def parakeet_pieces(settings: ParakeetMel, section: Section, samples: Samples) -> list[MediaInput]:
    """Return the pieces of a sound, whose bands are normalised each by itself."""
    made, size = [], settings.num_frames * _HOP
    for start in range(0, max(1, len(samples)), size):
        part = samples[start : start + size]
        features = settings.features(np.pad(part, (0, max(0, _LEAST - len(part)))))
        made.append(sound_input({"input_features": features}, num_parakeet_vectors(len(features) * _HOP)))
    return made


def parakeet_window(section: Section) -> tuple[int, int]:
    """Return frames and vectors of the longest piece."""
    whole = ParakeetMel(1)
    return whole.num_frames, whole.num_vectors


def nemotron_around(config: Section, encode: Callable[[str], list[int]]) -> Around:
    """Return the tokens that begin and end a sound."""
    return Around(encode("<so_start>"), behind=encode("<so_end>"))
