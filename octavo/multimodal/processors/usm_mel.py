"""The spectrogram that the encoders of Gemma 3n and Gemma 4 hear, by transformers' feature extractors, in numpy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.multimodal.processors.log_mel import extractor_settings, sampling_rate
from octavo.multimodal.sound import Samples

MOST_S: Final = 30.0
"""Longest sound, in seconds, that the encoder reads."""
_MOST_MS: Final = 1000.0
"""Most milliseconds of a frame, and between the beginnings of two frames."""
_NUMBERS: Final = ("min_frequency", "max_frequency", "preemphasis", "input_scale_factor", "mel_floor")
_FLAGS: Final = ("preemphasis_htk_flavor", "fft_overdrive")
_BINS: Final = ("per_bin_mean", "per_bin_stddev")


class UsmMel(msgspec.Struct, frozen=True, dict=True):
    """Settings of a feature extractor of the Universal Speech Model."""

    extractor: str
    """Its class in transformers."""
    settings: Mapping[str, Any]
    """Its settings, by its names."""
    sampling_rate: int
    seconds: float
    """Length of the longest sound."""
    num_vectors: int
    """Vectors of the longest sound."""

    @classmethod
    def of(cls, path: Path, extractor: str, num_bands: int, frame_ms: float, num_vectors: int) -> UsmMel:
        """Read the settings of a checkpoint. frame_ms: how long a frame is where they do not say it. num_vectors: of
        half a minute. Raises CheckpointError or UnsupportedModel."""
        section = extractor_settings(path)
        rate = sampling_rate(section)
        section.expect("feature_size", num_bands, default=num_bands)
        section.expect("dither", 0.0, default=0.0)  # noise, with which a sound never sounds the same twice
        lengths = {"frame_length_ms": frame_ms, "hop_length_ms": 10.0}
        for name, default in lengths.items():
            lengths[name] = section.positive_float(name, default)
            if not 1000.0 / rate <= lengths[name] <= _MOST_MS:
                raise section.error(name, f"at least one sample, and at most {_MOST_MS:,.0f}")
        settings: dict[str, Any] = {"feature_size": num_bands, "sampling_rate": rate, **lengths}
        settings |= {name: section.float(name) for name in _NUMBERS if section.values.get(name) is not None}
        if "mel_floor" in settings:
            section.positive_float("mel_floor")  # its logarithm is taken
        settings |= {name: section.bool(name) for name in _FLAGS if section.values.get(name) is not None}
        for name in _BINS:
            numbers = section.values.get(name)
            if numbers is not None and not _are_numbers(numbers, num_bands, is_divisor=name == "per_bin_stddev"):
                raise section.error(name, f"{num_bands} numbers, one for each band; none is 0 in per_bin_stddev")
            settings[name] = numbers
        return cls(extractor, settings, rate, MOST_S, num_vectors)

    @cached_property
    def _extractor(self) -> Any:
        import transformers

        return getattr(transformers, self.extractor)(**self.settings)

    def features(self, samples: Samples) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return [frames, bands] of a sound, and which of them are frames of it, [frames]."""
        made = self._extractor([samples], truncation=False, return_tensors="np")
        return made["input_features"][0], made["input_features_mask"][0].astype(np.int64)


def _are_numbers(values: Any, count: int, *, is_divisor: bool) -> bool:
    return (
        isinstance(values, list)
        and len(values) == count
        and all(type(each) in (int, float) and math.isfinite(each) and (each or not is_divisor) for each in values)
    )
