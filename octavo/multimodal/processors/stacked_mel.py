"""How Fun-ASR-Nano reads sounds: Kaldi's spectrogram, several frames beside each other, in numpy."""

from __future__ import annotations

from functools import cached_property
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.config.checkpoint import Checkpoint
from octavo.config.section import Section, read_section
from octavo.core.media import MediaInput
from octavo.multimodal.processors.log_mel import PREPROCESSOR_CONFIG, kaldi_filters
from octavo.multimodal.sound import Samples, sound_input, too_short

_MOST_S: Final = 120.0
_WIDTH: Final = 400
_HOP: Final = 160
_SPECTRUM: Final = 512
"""Samples of a frame, between two, and of its transform."""
_PREEMPHASIS: Final = np.float32(0.97)
_PIECE: Final = 1 << 12
"""Frames whose spectra are in memory at once."""


class StackedMel(msgspec.Struct, frozen=True, dict=True):
    """stacked: frames beside each other; stride: frames between the first of them and those of the next vector."""

    bands: int
    stacked: int
    seconds: float
    stride: int = 6
    sampling_rate: int = 16_000

    @classmethod
    def of(cls, checkpoint: Checkpoint, section: Section) -> StackedMel:
        """Read the settings of a checkpoint. section: its encoder in config.json. Raises CheckpointError or
        UnsupportedModel."""
        bands, stacked = section.positive("num_mel_bins", 80), section.positive("num_stacked_frames", 7)
        settings = read_section(checkpoint.path / PREPROCESSOR_CONFIG, may_lack=True)
        settings.expect_all(sampling_rate=16_000, frame_length=25, frame_shift=10, stride_lfr=6, window="hamming")
        settings.expect_all(feature_size=bands, num_frames_lfr=stacked)
        most = section.positive("max_position_embeddings", 2049) - 1  # positions are counted from one
        return cls(bands, stacked, min(_MOST_S, most * 6 * 0.01))

    @property
    def num_vectors(self) -> int:
        """Vectors of the longest sound."""
        return self._num_stacked(self._num_frames(int(self.seconds * self.sampling_rate)))

    def _num_frames(self, num_samples: int) -> int:
        return max(0, (num_samples - _WIDTH) // _HOP + 1)

    def _num_stacked(self, num_frames: int) -> int:
        return -(-num_frames // self.stride)

    @cached_property
    def _filters(self) -> NDArray[np.float32]:
        return kaldi_filters(_SPECTRUM, self.bands, 20.0, self.sampling_rate / 2, self.sampling_rate)

    def features(self, samples: Samples) -> NDArray[np.float32]:
        """Return [vectors, bands · stacked] of a sound; samples behind the last whole frame are left out."""
        count = self._num_frames(len(samples))
        made = np.empty((count, self.bands), np.float32)
        window, filters = np.hamming(_WIDTH).astype(np.float32), self._filters
        for start in range(0, count, _PIECE):
            places = np.arange(start, min(start + _PIECE, count))[:, None] * _HOP
            frames = samples[places + np.arange(_WIDTH)].astype(np.float32, copy=False)
            frames = frames - frames.mean(1, keepdims=True)
            frames = frames - _PREEMPHASIS * np.concatenate([frames[:, :1], frames[:, :-1]], 1)
            power = np.abs(np.fft.rfft(window * frames, _SPECTRUM)).astype(np.float32) ** 2
            made[start : start + len(places)] = np.log(np.maximum(power @ filters, np.finfo(np.float32).eps))
        if not count:
            return np.empty((0, self.bands * self.stacked), np.float32)
        before, num_vectors = (self.stacked - 1) // 2, self._num_stacked(count)
        places = np.arange(num_vectors)[:, None] * self.stride + np.arange(self.stacked) - before
        return np.take(made, places.clip(0, count - 1), 0).reshape(num_vectors, -1)


def stacked_sound(settings: StackedMel, section: Section, samples: Samples) -> list[MediaInput]:
    """Return the whole sound. Raises InvalidRequest for one that is shorter than a frame."""
    features = settings.features(samples)
    if not len(features):
        raise too_short(samples, settings.sampling_rate, f"{_WIDTH / settings.sampling_rate:.3f}")
    mask = np.ones(len(features), np.int64)
    return [sound_input({"input_features": features, "input_features_mask": mask}, len(features))]
