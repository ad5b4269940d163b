"""How Phi-4-multimodal reads sounds: transformers' spectrogram, which it computes with torch, in numpy."""

from __future__ import annotations

from functools import cached_property
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.config.checkpoint import Checkpoint
from octavo.config.section import Section
from octavo.core.media import MediaInput
from octavo.multimodal.processors.log_mel import extractor_settings, kaldi_filters, sampling_rate
from octavo.multimodal.sound import Samples, sound_input, too_short

MOST_S: Final = 300.0
"""Seconds of a sound: the first convolution of the encoder takes 8 MB for each in float32."""
_LARGEST: Final = 1 << 12
"""Samples of a frame, and between two."""
_PIECE: Final = 1 << 12
"""Frames whose spectra are in memory at once."""


class Phi4Mel(msgspec.Struct, frozen=True, dict=True):
    """Settings of the feature extractor, by its names. joined: frames that become one vector."""

    joined: int
    feature_size: int = 80
    sampling_rate: int = 16_000
    hop_length: int = 160
    n_fft: int = 512
    win_length: int = 400
    preemphasis: float = 0.97
    mel_min_frequency: float = 0.0
    mel_max_frequency: float = 7690.0
    seconds: float = MOST_S

    @classmethod
    def of(cls, checkpoint: Checkpoint, section: Section) -> Phi4Mel:
        """Read the settings of a checkpoint. section: its encoder in config.json. Raises CheckpointError or
        UnsupportedModel."""
        settings = extractor_settings(checkpoint.path)
        joined, bands = section.positive("time_reduction", 8), section.positive("input_size", 80)
        settings.expect_all(audio_compression_rate=joined, feature_size=bands)
        settings.expect_all(audio_downsample_rate=1, audio_feat_stride=1)
        rate, size = sampling_rate(settings), settings.positive("n_fft", 512)
        hop, width = settings.positive("hop_length", 160), settings.positive("win_length", 400)
        if size > _LARGEST or width > size:
            name, most = ("n_fft", f"{_LARGEST:,}") if size > _LARGEST else ("win_length", f"n_fft, which is {size}")
            raise settings.error(name, f"at most {most}")
        highest = settings.positive_float("mel_max_frequency", 7690.0)
        lowest = float(settings.values.get("mel_min_frequency") or 0.0)
        return cls(joined, bands, rate, hop, size, width, settings.float("preemphasis", 0.97), lowest, highest)

    @property
    def num_vectors(self) -> int:
        """Vectors of the longest sound."""
        return -(-int(self.seconds * self.sampling_rate) // (self.hop_length * self.joined))

    @cached_property
    def _filters(self) -> NDArray[np.float32]:
        edges = self.mel_min_frequency, self.mel_max_frequency
        return kaldi_filters(self.n_fft, self.feature_size, *edges, self.sampling_rate)

    def features(self, samples: Samples) -> NDArray[np.float32]:
        """Return [frames, bands] of a sound; samples behind the last whole frame are left out."""
        count = max(0, (len(samples) - self.win_length) // self.hop_length + 1)
        made = np.empty((count, self.feature_size), np.float32)
        window, filters = np.hamming(self.win_length), self._filters
        for start in range(0, count, _PIECE):
            places = np.arange(start, min(start + _PIECE, count))[:, None] * self.hop_length
            frames = samples[places + np.arange(self.win_length)].astype(np.float32, copy=False)
            before = np.concatenate([frames[:, :1], frames[:, :-1]], 1)
            frames = (frames - np.float32(self.preemphasis) * before) * np.float32(32768)
            spectrum = np.fft.rfft(window * frames, self.n_fft).astype(np.complex64)
            power = np.abs(spectrum) ** 2
            made[start : start + len(places)] = np.log(np.maximum(power @ filters, 1.0))
        return made


def phi4_sound(settings: Phi4Mel, section: Section, samples: Samples) -> list[MediaInput]:
    """Return the whole sound. Raises InvalidRequest for one that is shorter than a frame."""
    features = settings.features(samples)
    if not len(features):
        raise too_short(samples, settings.sampling_rate, f"{settings.win_length / settings.sampling_rate:.3f}")
    return [sound_input({"input_features": features}, -(-len(features) // settings.joined))]
